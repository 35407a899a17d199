for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const down = head.getAttribute("aria-sort") !== "descending";
      const rows = [...table.tBodies[0].rows];
      const missing = rows.filter((row) => value(row) === "");
      const known = rows.filter((row) => value(row) !== "");
      const numeric = known.every((row) => !Number.isNaN(Number(value(row))));
      known.sort((a, b) => numeric ? value(a) - value(b) : value(a).localeCompare(value(b)));
      if (down) known.reverse();
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...known, ...missing);
    });
  });
}
