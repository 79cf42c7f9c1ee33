"use strict";
(() => {
  for (const box of document.querySelectorAll(".explorer")) {
    const { levels, settings } = JSON.parse(box.querySelector(".explorer-data").textContent);
    const form = box.querySelector("form");
    const { load, metric, shown } = form.elements;
    const map = box.querySelector("table.map");
    const figures = box.querySelector("table.picked");
    const names = [...box.querySelectorAll("datalist option")].map((option) => option.label);
    // Cells by the setting that they stand for; the first of each row is its header.
    const cells = new Map();
    settings.forEach((row, r) =>
      row.forEach((setting, c) => {
        if (setting !== null) cells.set(setting, { r, c, box: map.tBodies[0].rows[r].cells[c + 1] });
      }),
    );
    // What was pointed at last, and null as long as it is the best that is shown.
    let picked = null;

    const level = () => levels[Number(load.value)];
    const of = (setting) => level().cells[cells.get(setting).r][cells.get(setting).c];

    const compare = () => {
      const { best, current } = level();
      const setting = picked ?? best;
      for (const [name, { box: cell }] of cells) {
        cell.classList.toggle("picked", name === setting);
        cell.tabIndex = name === setting ? 0 : -1;
      }
      const columns = [setting, best, current].map((name) => of(name).figures);
      const heads = figures.tHead.rows[0].cells;
      heads[1].textContent = setting;
      heads[2].textContent = level().best_as;
      [...figures.tBodies[0].rows].forEach((row, i) => {
        columns.forEach((column, k) => (row.cells[k + 1].textContent = column[i]));
      });
    };

    const redraw = () => {
      const at = Number(metric.value);
      for (const [name, { box: cell }] of cells) {
        const { figures: texts, heats, mark, note } = of(name);
        const state = texts.at(-1);
        cell.className = mark;
        cell.style.setProperty("--heat", heats[at] ?? 0);
        cell.textContent = texts[at];
        const put = (kind, text, look) => {
          if (!text) return;
          const part = document.createElement(kind);
          part.textContent = text;
          part.className = look;
          cell.append(part);
        };
        put("small", note, "");
        put("span", state === "holds" ? "" : `, ${state}`, "unseen");
      }
      shown.value = names[Number(load.value)];
      load.setAttribute("aria-valuetext", shown.value);
      box.querySelector(".now").textContent = level().says;
      compare();
    };

    const pick = (setting, isFocused) => {
      picked = setting;
      compare();
      if (isFocused) cells.get(setting).box.focus();
    };

    // The next setting in a direction, past what is none; of the next row that has any, the nearest.
    const neighbour = (r, c, [down, right]) => {
      const ahead = (cell) => (cell.r - r) * down + (cell.c - c) * right;
      const aside = (cell) => Math.abs((cell.r - r) * right) + Math.abs((cell.c - c) * down);
      return [...cells]
        .filter(([, cell]) => ahead(cell) > 0 && (down !== 0 || aside(cell) === 0))
        .sort(([, a], [, b]) => ahead(a) - ahead(b) || aside(a) - aside(b))[0]?.[0];
    };

    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    for (const [name, { r, c, box: cell }] of cells) {
      cell.addEventListener("pointerenter", () => pick(name, false));
      cell.addEventListener("focus", () => pick(name, false));
      cell.addEventListener("keydown", (event) => {
        if (!(event.key in steps)) return;
        event.preventDefault();
        const next = neighbour(r, c, steps[event.key]);
        if (next) pick(next, true);
      });
    }
    map.addEventListener("pointerleave", () => {
      picked = null;
      compare();
    });
    form.addEventListener("input", redraw);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = false;
    redraw();
  }
})();
