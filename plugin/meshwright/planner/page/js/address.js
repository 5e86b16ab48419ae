// The state of the page stands in its address, so that a setting is a link.

const plannedLabel = (index) => choiceAt(index, data.planned).label;

function writeAddress() {
  const parts = SLIDERS.map((name, slider) => [name, data.sliders[name][state.setting[slider]]]);
  for (const key of ["plan", "other"]) if (state[key] !== null) parts.push([key, plannedLabel(state[key])]);
  for (const key of ["tokens", "price"]) if (state[key]) parts.push([key, state[key]]);
  const isStart = isPlannedSetting() && state.plan === null && state.other === null
    && state.tokens === data.run.tokens && state.price === data.run.price;
  try {
    history.replaceState(null, "", isStart ? location.pathname + location.search : `#${new URLSearchParams(parts)}`);
  } catch {
    // a browser may limit how often the address changes; the next change writes it
  }
}

// Returns the state that the address names; what this page does not have stays as it was planned.
function readAddress() {
  const named = new URLSearchParams(location.hash.slice(1));
  const setting = SLIDERS.map((name, slider) => {
    const at = data.sliders[name].indexOf(Number(named.get(name)));
    return named.has(name) && at >= 0 ? at : data.planned[slider];
  });
  const index = (key) => {
    const at = data.plans.findIndex((_, plan) => named.get(key) === plannedLabel(plan));
    return at >= 0 ? at : null;
  };
  return { setting, plan: index("plan"), other: index("other"),
    tokens: named.get("tokens") ?? data.run.tokens, price: named.get("price") ?? data.run.price };
}
