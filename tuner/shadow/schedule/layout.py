"""Where everything stands in the arrays of a replay: what the compiled parts have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from tuner.shadow.compiled import part

# The columns of a slot: what is known of a request that runs or was preempted. END is the step
# in which its last token is scheduled, ORDER the count of admissions when it began to run,
# TAKEN what this step schedules of it, MISSED whether the step before left it out. Of groups
# that look back a window SKIPPED counts the blocks given back from its beginning, STEADY is the
# step from which on a decoding request gives back one at a time, OVERTAKES that of the first
# of these, JUNCTION how many blocks other groups had in the prefix cache and these had not; of
# a prompt LATEST is the step that last computed some, and PART how much. LISTED is the ORDER of
# the entry that it has among the UNSTEADY, and one more; 0 where it has none. STATED is how
# many blocks groups of states have of it, those passed over too, but not those for drafts. Of
# who VERIFIES drafts DRAFTED is how many an even step has beside the token that it decodes,
# below 0 where they only pad, an odd step's stand behind; ROUNDS is how often it has brought
# out tokens.
(
    ROW, PROMPT, OUTPUT, ANSWERED, COMPUTED, END, STATE, BLOCKS, ORDER, PLACE, CACHED,
    TAKEN, END_NEXT, END_BEFORE, BUCKET_NEXT, BUCKET_BEFORE, MISSED, RESUMED, ARRIVAL,
    SKIPPED, STEADY, OVERTAKES, LATEST, PART, JUNCTION, LISTED, DRAFTED, _, ROUNDS, STATED,
    SLOT_FIELDS,
) = range(31)  # fmt: skip
NOBODY, PREFILLS, DECODES, PREEMPTED, VERIFIES = range(5)

# The integers of a replay's state. STEP counts the batches that were scheduled, DONE is the
# last that was completed; CONTEXT is the sum of what decoding requests attend to, less STEP
# for each of them, SQUARES that of its squares less ORIGIN, a step of not long ago.
(
    STEP, DONE, RUNNING, RUN_LENGTH, DECODING, PREFILLING, LAST_PREFILL, CONTEXT, FREE,
    QUEUE_HEAD, QUEUE_TAIL, FRONT, WAITING, ORDERS, HELD, TIDY, IN_PIPE, SENT, ENDED,
    IN_FLIGHT, MISSING, OLDEST, NEXT_LATE, LATE, STUCK, READY, NEXT, GOING, LOGGED,
    FREE_SLOTS, STATUS, MEASURES, SQUARES, ORIGIN,
    # Batches without anything; whether this one carries a prompt, and how many with anything
    # there were by the last that did; whether prompts were left waiting.
    EMPTY, CARRIES, CARRIED, BACKED_UP,
    # The first and the last of those who wait before the gate.
    GATE_HEAD, GATE_TAIL,
    # From which step on all who decode are STEADY, how many entries there are of those that
    # were not of late, and the last step whose OVERTAKES are counted.
    ALL_STEADY, UNSTEADY, OVERTAKEN,
    # What the replay is: constant from here on.
    CAP, BUDGET, INPUT_BUDGET, THRESHOLD, ADAPTIVE, CHUNKS, RESERVES, WATERMARK, PRIORITY,
    AHEAD, BLOCK, ALL_BLOCKS, MAX_LENGTH, IS_CACHED, WOULD_CACHE, ARRIVALS, ALLOWED_LATE,
    KEEPS_LOG, BATCH_SIZE, REQUESTS, RECORDED_BLOCK, LINK_KEYS, SLOTS, WIDTH, TARGETS,
    KNOTS, LONE, KEYLESS_FIRST, OMITS, YIELDS, INTERVAL, LAST_DAY, GATE_CAP, GATE_ROOM,
    LED_IN,
    # Groups of layers with a block each for the same tokens, and how many of them look back a
    # WINDOW of tokens; what such a group holds of a request at most, in blocks; and the blocks
    # of a request that one group's part of a table has room for. SETTLES says whether what lies
    # behind a window is kept until no batch on its way reads it. RETENTION is after how many
    # blocks the prefix cache keeps a window, -1 where it keeps all; JUNCTIONS says whether it
    # does where prompts part. A block of those that look back is as large as BACK_SPAN blocks
    # of BLOCK tokens, of others as FULL_SPAN; a hit ends at a multiple of ALIGNED such blocks,
    # or ROUND tokens.
    GROUPS, WINDOWED, WINDOW, MOST_IN_WINDOW, ROOM_OF_GROUP, SETTLES,
    RETENTION, JUNCTIONS, FULL_SPAN, BACK_SPAN, ALIGNED, ROUND,
    # How many of the groups that look back keep states, of which a request takes one at a time,
    # where a part of its prompt ends, or two if it is a multiple of TWO_EVERY tokens; whether
    # such a part ends before the last token in any case; whether the state there gets its key
    # anew in every step as long as it is held; how many more blocks each holds for SCRATCH, the
    # states of drafts; and the blocks that a request holds beside all that, however long it is.
    STATES, TWO_EVERY, PARTS_BEFORE_LAST, KEYS_ANEW, SCRATCH, FIXED,
    # How many DRAFTS each request verifies in a step, how many tokens ahead of a batch have
    # their blocks too, and whether groups that see all or that look back drop the last block
    # of a hit since drafts need its hidden states, or how many tokens behind a block it is
    # found by too; whether blocks have their keys as soon as tokens are there, and not in the
    # step after.
    DRAFTS, LOOKAHEAD, FULL_DROPS, BACK_DROPS, HASHED_AHEAD, KEYS_AT_ONCE,
    # Whether who is admitted has blocks ahead, and by which rule a lone token is padded; how
    # much of the budget each request takes, and BESIDE the tokens of a step that it is in,
    # where it does not go by the cap.
    ADMITS_AHEAD, PADDING, DRAFT_SLOTS, BESIDE,
    # Where the parts of the work array begin.
    AT_RUN, AT_CALENDAR, AT_WANTED, AT_BUCKETS, AT_FRONT, AT_FREE_SLOTS,
    AT_UNSTEADY, AT_LONG, AT_OVERTAKES,
    AT_SINGLES, AT_ENDS, AT_BATCHES, AT_MIXED, AT_KNOTS, AT_FACTORS, FACTOR_ROWS,
    FACTOR_COLUMNS, AT_LAUNCHES, AT_RATES, INTEGERS,
) = range(126)  # fmt: skip

# The instants and seconds of a replay's state, and the sums over its steps.
(
    NOW, BEFORE, FIRST_DUE, PATIENCE, LATE_S, MAX_CLOCK, END_S, BASE_S, SEQ_S, EAGER_S,
    PREFILL_BASE_S, DECODE_CONTEXT_S, MIXED_CONTEXT_S, SPREAD_S, MIXED_SPREAD_S,
    PREFILL_CONTEXT_S, TIDY_S, BATCH_WAIT_S, LEAD_S, GATE_WAIT_S,
    # What launching takes the host: a batch with a prompt in a graph, one without, and for
    # each sequence and token; when it has launched the newest batch, and whether it noticed the
    # last one late; when the device has nothing left, and when each batch on its way ends.
    HOST_MIXED_S, HOST_EAGER_S, HOST_SEQ_S, HOST_TOKEN_S, LAUNCHED, WAS_LATE, DEVICE,
    ENDS_0, ENDS_1, ENDS_2, ENDS_3, STEPS_N, STEPS_S, HOST_BOUND_S,
    CACHED_N, PREEMPTED_N, FULLEST, PEAK_RUNNING, PEAK_WAITING,
    PEAK_USED,
    # Steps that decode alone: how many, sequences, their squares, seconds, seconds x sequences.
    ALONE_N, ALONE_SEQS, ALONE_SQUARES, ALONE_S, ALONE_PRODUCT,
    # The others: how many, sequences, prompt tokens, seconds.
    MIXED_N, MIXED_SEQS, MIXED_TOKENS, MIXED_S, FLOATS,
) = range(50)  # fmt: skip

# The columns of a request's instants, of its answer, and of what refers to it.
DUE, SENT_AT, FIRST, LAST = range(4)
TOKENS, OUTCOME = range(2)
QUEUE, SLOT_OF, IS_LATE, AT_GATE, REFERENCES = range(5)
COMPLETED, REFUSED, TIMED_OUT, ABORTED, UNFINISHED, TURNED_AWAY, TRUNCATED, GOES_ON = range(8)

# Whether a request begins to hold states, with those for its drafts.
GOES_FURTHER, BEGINS = range(2)

# Whether the layers of a group need all of the past.
SEES_ALL, LOOKS_BACK = range(2)

# Rules by which a lone token is padded to the shape of a batch that verifies drafts: never,
# beside others or it waits, beside them where it fits, or alone where it goes on from a hit.
NEVER_PADS, PADS_OR_WAITS, PADS_BESIDE, PADS_ALONE = range(4)

# How requests arrive.
OPEN, CAUSAL, CLOSED, BATCHES = range(4)

# The columns of a batch on its way; EVEN counts the requests that were in the batch before too.
(
    B_DECODES, B_PREFILL, B_SEQS, B_DECODE_CONTEXT, B_PREFILL_CONTEXT, B_PREEMPTED,
    B_CACHED, B_RUNNING, B_WAITING, B_USED, B_EVEN, B_SINGLES, B_ENDS, B_SQUARES, B_DRAFTS,
    BATCH_FIELDS,
) = range(16)  # fmt: skip
PIPE = 4  # batches that the arrays hold at once, a power of two: more than are on their way

# The columns of the log: those of engine.steps.StepColumns, of which two are in blocks here.
LOG_FIELDS, USED_COLUMNS = 17, (10, 11)
# Histograms: gaps between tokens, steps that decode alone, running, waiting, used blocks.
GAPS, DECODE_STEPS, H_RUNNING, H_WAITING, H_USED, HISTOGRAMS = range(6)
# A bin for each key of stats.LogHistogram from 2^-33 to 2^26, those at the ends hold what lies
# beyond. Each has a weight and a total. Behind them stands a mark for each stretch of bins,
# whether any of it was counted.
BIN_SHIFT, STRETCH_SHIFT = 41, 6
LOWEST_KEY, BINS = (1023 - 33) << 11, 59 << 11
ROOM = 2 * BINS + (BINS >> STRETCH_SHIFT)
BIN_RATIO = 2.0**-11

# The columns of a block: its neighbours in the free queue, who holds it, the next with the same
# key, and in which step it last got its key.
NEXT_FREE, BEFORE_FREE, HOLDERS, SAME_KEY, KEYED_IN, BLOCK_FIELDS = range(6)
NO_KEY, NO_BLOCK = -1, -1
# Of a block that is cached by a part of it, which nobody looks up.
PART_KEY = -(1 << 62)

GOES, ENDED_WELL, NEEDS_CACHE, IS_STUCK, LOST_WORK, LATE_CUT, CLOCK_CUT, NO_SLOT = range(8)
STUCK_TURNS = 10_000


class Requests(NamedTuple):
    """What is replayed, and who waits for whose answer.

    `ready` is a heap of due time and row of the sessions' requests that may go; the followers
    of a row stand from follows[row] to follows[row + 1]; `targets` are the times and numbers of
    requests that a closed loop holds in flight.

    Shapes: prompts, outputs and pauses_s are [n], priorities [n] or [0], ready [n, 2], follows
        [n + 1], targets [changes, 2].
    Units: tokens, seconds.
    """

    prompts: Any
    outputs: Any
    priorities: Any
    ready: Any
    follows: Any
    followers: Any
    pauses_s: Any
    targets: Any


class Cache(NamedTuple):
    """The blocks of the KV cache, where blocks are more than a number.

    `tables` hold the blocks of each slot, and then those that it alone can find again. `heads`
    has for each key that requests share the block that has it for longest; a beginning of a
    prompt is numbered in `links`, from starts[row] on, for the first covered[row] tokens. The
    first held[row] tokens of a prompt are the prompt and the answer of row before[row]. Others
    hold the first reached[row] tokens of a row; what of these is in no numbered beginning has
    keys from firsts[row] on. `looks_back` says which groups of layers need the last of the past
    alone; each has a part of a slot's table, one behind the other.

    Shapes: pool is [blocks + 1, BLOCK_FIELDS], keys [blocks + 1], tables [2, slots, width],
        looks_back [groups].
    """

    pool: Any
    keys: Any
    tables: Any
    heads: Any
    links: Any
    starts: Any
    covered: Any
    before: Any
    held: Any
    reached: Any
    firsts: Any
    looks_back: Any


inner = part()
inlined = part(is_inlined=True)
