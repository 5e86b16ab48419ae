// The answers of the page are compressed JSON, and `data` is the one that is shown.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}
const answers = await unpacked(document.getElementById("data").textContent);
let data = answers[0];

// Numbers as text, in the same words as the planner's own output. Sizes are in MiB and times in milliseconds.

const gib = (mib) => `${(mib / 1024).toFixed(1)} GiB`;

function seconds(milliseconds) {
  const value = milliseconds / 1e3;
  if (value >= 1) return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} s`;
  return `${milliseconds.toFixed(milliseconds >= 10 ? 0 : 1)} ms`;
}

const { format } = new Intl.NumberFormat("en-US");
const grouped = (value) => format(Math.round(value));
const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;
const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
const span = (first, last) => (first === last ? `${first}` : `${first}\u2013${last}`);
const sum = (values) => values.reduce((total, value) => total + value, 0);

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => String(text).replace(/[&<>"']/g, (character) => ESCAPES[character]);

// Returns about `count` round numbers from `low` to `high`.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.99);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high * (1 + 1e-9); index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

function table(caption, head, rows) {
  const cells = (row, first, rest) =>
    row.map((cell, index) => (index ? `<${rest} class="num">${escape(cell)}</${rest}>` : first(cell))).join("");
  const header = cells(head, (cell) => `<th scope="col">${escape(cell)}</th>`, 'th scope="col"')
    .replaceAll('</th scope="col">', "</th>");
  const body = rows
    .map((row) => `<tr>${cells(row, (cell) => `<th scope="row">${escape(cell)}</th>`, "td")}</tr>`)
    .join("");
  return `<table><caption>${escape(caption)}</caption><thead><tr>${header}</tr></thead><tbody>${body}</tbody></table>`;
}
