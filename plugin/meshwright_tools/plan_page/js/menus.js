// The menus choose among the page's answers, each of which is the planner's own for a GPU and a precision.

const MENUS = { gpu: (answer) => answer.device.name, precision: (answer) => answer.precision };
let drawnAnswer = answers[0]; // of which the page has the static texts

// Returns the answer of a GPU and a precision; if there is none, one that has what was chosen last.
function answerFor(wanted, chosen) {
  const has = (names) => answers.find((answer) => names.every((name) => MENUS[name](answer) === wanted[name]));
  return has(Object.keys(MENUS)) ?? has([chosen]) ?? data;
}

// Shows another answer. Plans that it has too stay picked, and a price that the reader has written stays.
function turn(chosen, value) {
  const was = data;
  const labels = ["plan", "other"].map((key) => (state[key] === null ? null : plannedLabel(state[key])));
  const now = { gpu: MENUS.gpu(was), precision: MENUS.precision(was), [chosen]: value };
  data = answerFor(now, chosen);
  const [plan, other] = labels.map((label) => planNamed(label));
  change({ plan, other, price: state.price === was.run.price ? data.run.price : state.price });
}

const tableRows = (rows) => rows.map(([first, ...cells]) => `<tr><th scope="row">${escape(first)}</th>${
  cells.map((cell, index) => `<td${index === 1 ? ' class="num"' : ""}>${escape(cell)}</td>`).join("")}</tr>`).join("");

// Draws what does not depend on the sliders, if it is that of another answer.
function drawAnswer() {
  for (const [name, of] of Object.entries(MENUS)) {
    const menu = $(`#${name}`);
    if (!menu) continue;
    menu.value = of(data);
    for (const option of menu.options) {
      option.disabled = name === "precision" && !answers.some((answer) =>
        answer.device.name === data.device.name && answer.precision === option.value);
    }
  }
  const body = $("#plans tbody");
  if (body.rows.length !== data.plans.length || drawnAnswer !== data) {
    const row = body.rows[0];
    body.replaceChildren(...data.plans.map((_, index) => {
      const copy = row.cloneNode(true);
      copy.dataset.plan = index;
      return copy;
    }));
    $("#more").hidden = data.plans.length <= 6;
    labelMore();
  }
  if (drawnAnswer === data) return;
  drawnAnswer = data;
  for (const name of ["job", "footer"]) $(`#${name}`).textContent = data[name];
  $("#why tbody").innerHTML = tableRows(data.why);
  for (const details of $$("#why details")) details.hidden = true; // the first table has all rows now
  $("#changes tbody").innerHTML = tableRows(data.changes);
  if ($("#trainings")) $("#trainings tbody").innerHTML = tableRows(data.compared);
}

function labelMore() {
  const isFolded = $("#plans").classList.contains("is-folded");
  $("#more").textContent = isFolded ? `Show all ${data.plans.length} plans` : "Show fewer plans";
}

for (const name of Object.keys(MENUS)) {
  document.getElementById(name)?.addEventListener("change", (event) => turn(name, event.target.value));
}
