// A click on a function adds a row with a table for the chosen pair of settings.
const all = JSON.parse(document.getElementById("pairs").textContent);
const element = (name, text) => { const x = document.createElement(name); if (text !== undefined) x.textContent = text; return x; };
function table(pair, counts) {
  const [a, b] = pair.split(" × "), split = Object.keys(counts).map(key => key.split(" × "));
  const place = text => { const n = parseFloat(text.replaceAll(",", "")); return isNaN(n) ? Infinity : n; };
  const sorted = texts => [...new Set(texts)].sort((x, y) => place(x) - place(y) || x.localeCompare(y));
  const rows = sorted(split.map(x => x[0])), columns = sorted(split.map(x => x[1]));
  const most = Math.max(...Object.values(counts).map(x => x[0])), out = element("table"), head = out.insertRow();
  head.append(element("th", a + " \\ " + b), ...columns.map(x => element("th", x)));
  for (const row of rows) {
    const line = out.insertRow(); line.append(element("th", row));
    for (const column of columns) {
      const cell = line.insertCell(), [cases, wrong] = counts[row + " × " + column] || [0, 0];
      cell.textContent = cases; cell.title = `${a} = ${row}, ${b} = ${column}: ${cases} cases, ${wrong} wrong`;
      cell.style.setProperty("--d", cases ? 0.1 + 0.6 * Math.log(1 + cases) / Math.log(1 + most) : 0);
      cell.className = wrong ? "w" : cases ? "" : "none";
    }
  }
  return out;
}
function shown(name) {
  const pairs = all[name] || {}, box = element("div"), choice = element("select"), place = element("div");
  box.className = "pairs";
  const empty = pair => { const split = Object.keys(pairs[pair]).map(x => x.split(" × "));
    return new Set(split.map(x => x[0])).size * new Set(split.map(x => x[1])).size - split.length; };
  for (const pair of Object.keys(pairs).sort((x, y) => empty(y) - empty(x)))
    choice.append(new Option(`${pair} (${empty(pair)} never together)`, pair));
  choice.onchange = () => place.replaceChildren(table(choice.value, pairs[choice.value]));
  box.append(choice, place);
  if (choice.value) choice.onchange(); else place.textContent = "No pair of settings.";
  return box;
}
for (const row of document.querySelectorAll("tr[data-function]")) row.querySelector("button").onclick = () => {
  const next = row.nextElementSibling;
  if (next && next.dataset.pairs) { next.remove(); return; }
  const more = element("tr"), cell = more.insertCell(); more.dataset.pairs = "1"; cell.colSpan = 6;
  cell.append(shown(row.dataset.function)); row.after(more);
};
