for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, row = head.parentElement, table = head.closest("table");
    const column = [...row.children].indexOf(head), number = head.classList.contains("number");
    const was = head.getAttribute("aria-sort");
    const up = number ? was === "descending" : was !== "ascending";
    for (const other of row.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const of = (line) => line.children[column].dataset.value ?? line.children[column].textContent;
    const words = (a, b) => of(a).localeCompare(of(b), undefined, { numeric: true });
    const compare = number ? (a, b) => of(a) - of(b) : words;
    const lines = [...table.tBodies[0].rows].sort(compare);
    table.tBodies[0].append(...(up ? lines : lines.reverse()));
  });
}
