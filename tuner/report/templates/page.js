"use strict";
(() => {
  // The width of A4 within the page's margins, in CSS pixels.
  const PRINT_WIDTH_PX = 680;

  const specs = JSON.parse(document.getElementById("plot-specs").textContent);
  // A finger that drags wants to scroll, a mouse that drags wants to zoom.
  const dragmode = window.matchMedia("(pointer: coarse)").matches ? false : "zoom";
  const config = { displayModeBar: false, responsive: true };
  const boxes = specs.map((spec) => {
    const box = document.getElementById(spec.anchor);
    Plotly.newPlot(box, spec.data, { ...spec.layout, dragmode }, config);
    return box;
  });

  window.addEventListener("beforeprint", () => {
    for (const box of boxes) Plotly.relayout(box, { width: PRINT_WIDTH_PX });
  });
  window.addEventListener("afterprint", () => {
    for (const box of boxes) Plotly.relayout(box, { width: null, autosize: true });
  });

  const keyOf = (row, column) => {
    const order = row.cells[column].dataset.order;
    if (order === undefined) return null;
    return order !== "" && Number.isFinite(Number(order)) ? Number(order) : order;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));

  const sort = (table, column, isUp) => {
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => ({ row, key: keyOf(row, column) }));
    keyed.sort((a, b) => {
      // What has no value comes last, whichever way the others go.
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return isUp ? compare(a.key, b.key) : compare(b.key, a.key);
    });
    body.append(...keyed.map(({ row }) => row));
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const status = document.querySelector(`[data-for="${table.id}"]`);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const isUp = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
        sort(table, column, isUp);
        const way = isUp ? "ascending" : "descending";
        status.textContent = `sorted by ${head.textContent.trim()}, ${way}`;
      });
    });
  }
})();
