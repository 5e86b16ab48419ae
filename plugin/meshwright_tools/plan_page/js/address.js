// The state of the page stands in its address, so that a setting is a link.

const plannedLabel = (index) => choiceAt(index, data.planned).label;

function planNamed(label) {
  const at = data.plans.findIndex((_, plan) => label === plannedLabel(plan));
  return at >= 0 ? at : null;
}

function writeAddress() {
  const parts = SLIDERS.map((name, slider) => [name, data.sliders[name][state.setting[slider]]]);
  if (answers.length > 1) for (const [name, of] of Object.entries(MENUS)) parts.push([name, of(data)]);
  for (const key of ["plan", "other"]) if (state[key] !== null) parts.push([key, plannedLabel(state[key])]);
  for (const key of ["tokens", "price"]) if (state[key]) parts.push([key, state[key]]);
  const isStart = data === answers[0] && isPlannedSetting() && state.plan === null && state.other === null
    && state.tokens === data.run.tokens && state.price === data.run.price;
  try {
    history.replaceState(null, "", isStart ? location.pathname + location.search : `#${new URLSearchParams(parts)}`);
  } catch {
    // a browser may limit how often the address changes; the next change writes it
  }
}

// Returns the state that the address names, and turns to its answer; what this page does not have stays as it was planned.
function readAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  const wanted = answers.find((answer) => Object.entries(MENUS).every(([name, of]) => named.get(name) === of(answer)));
  data = wanted ?? answers[0];
  const setting = SLIDERS.map((name, slider) => {
    const at = data.sliders[name].indexOf(Number(named.get(name)));
    return named.has(name) && at >= 0 ? at : data.planned[slider];
  });
  return { setting, plan: planNamed(named.get("plan")), other: planNamed(named.get("other")),
    tokens: named.get("tokens") ?? data.run.tokens, price: named.get("price") ?? data.run.price };
}
