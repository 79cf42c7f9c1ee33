"""What tests share: a toy engine, traffic, and the parts that cases are made of."""
