// The rank grid: the node of each rank, its coordinate on each mesh axis, and its shard under ZeRO.

const CELLS = 64; // ranks drawn in a wide diagram; half as many in a narrow one
const COLUMNS = 4; // ranks side by side in a node
const WIDE_COLUMNS = 16; // ranks side by side in a node of many ranks
const SHADES = 8; // steps of lightness along an axis
const CELL = 66;
const GAP = 16;

const sizesOf = (choice) => ({ pp: choice.plan.pp, dp: choice.dp, cp: choice.plan.cp, tp: choice.plan.tp });

// Returns a rank's coordinate on each axis; tp is the innermost axis, then cp, dp and pp.
function coordinates(choice, rank) {
  const sizes = sizesOf(choice);
  const places = {};
  for (const axis of ["tp", "cp", "dp", "pp"]) {
    places[axis] = rank % sizes[axis];
    rank = Math.floor(rank / sizes[axis]);
  }
  return { pp: places.pp, dp: places.dp, cp: places.cp, tp: places.tp };
}

// Returns which shard of the state a rank keeps, and the number of shards.
function shardOf(choice, places) {
  const shards = (choice.dp / choice.replicate) * choice.plan.cp;
  const isSharded = choice.plan.zero > 0 && shards > 1;
  return isSharded ? [(places.dp * choice.plan.cp + places.cp) % shards, shards] : null;
}

function layersOf(choice, stage) {
  const { plan } = choice;
  const starts = plan.stages.map((_, index) => sum(plan.stages.slice(0, index)));
  const runs = plan.held[stage].map((held) => span(starts[held], starts[held] + plan.stages[held] - 1));
  return `layers ${runs.join(", ")}`;
}

function rankPicture(choice, width, ident) {
  const sizes = sizesOf(choice);
  const gpus = data.sliders.gpus[choice.setting[2]];
  const inNode = Math.min(data.gpusPerNode, gpus);
  const nodeCount = Math.max(1, Math.floor(gpus / inNode));
  const shown = Object.keys(sizes).filter((axis) => sizes[axis] > 1);
  const axes = shown.length ? shown : ["dp"];
  const isWide = width > 480;
  const cells = isWide ? CELLS : CELLS / 2;
  const inBox = Math.min(inNode, cells);
  let nodes = Math.min(nodeCount, Math.max(1, Math.floor(cells / inBox)));
  const across = Math.min(inBox, inBox <= 2 * COLUMNS || !isWide ? COLUMNS : WIDE_COLUMNS);
  const room = isWide ? Math.floor((width + GAP) / (across * CELL + 8 + GAP)) : 1;
  if (nodeCount > nodes && nodes > room && room > 0) nodes -= nodes % room; // whole rows, if nodes are left out anyway
  const boxes = Math.ceil(nodes / Math.ceil(nodes / Math.max(1, room)));
  const box = Math.min(Math.max(340, across * CELL + 12), (width - GAP * (boxes - 1)) / boxes);
  const head = choice.plan.pp > 1 ? 42 : 26;
  const tall = shardOf(choice, { dp: 0, cp: 0 }) ? 50 : 44;
  const cell = (box - 12) / across;
  const boxHeight = head + Math.ceil(inBox / across) * tall + 8;
  const rows = Math.ceil(nodes / boxes);
  const [more, cut] = [nodeCount - nodes, inNode - inBox];
  const description =
    `${gpus} ranks in ${plural(nodeCount, "node")} of ${inNode}; ` +
    Object.entries(sizes).map(([axis, size]) => `${axis}=${size}`).join(", ") +
    "; from the innermost to the outermost, the axes are tp, cp, dp and pp." +
    (choice.plan.ep > 1 ? ` Each ${choice.plan.ep} neighbours of a pipeline stage share the experts of its layers.` : "");
  const height = rows * (boxHeight + GAP) - GAP + (more || cut ? 24 : 0) + 2;
  const svg = new Svg({ ident, width, height, title: `Where each rank of ${choice.label} sits`, description });
  for (let node = 0; node < nodes; node++) {
    const left = (node % boxes) * (box + GAP);
    const top = Math.floor(node / boxes) * (boxHeight + GAP) + 1;
    const first = node * inNode;
    svg.rect([left + 0.5, top, box - 1, boxHeight], "node", { radius: 6 });
    svg.text(left + 10, top + 18, `node ${node}`, "strong");
    const ranks = `rank${inNode > 1 ? "s" : ""} ${span(first, first + inNode - 1)}`;
    svg.text(left + box - 10, top + 18, ranks, "muted num", "end");
    if (choice.plan.pp > 1) {
      const [from, to] = [first, first + inNode - 1].map((rank) => coordinates(choice, rank).pp);
      const held = from === to ? `stage ${from}: ${layersOf(choice, from)}` : `stages ${span(from, to)}`;
      svg.text(left + 10, top + 34, shortened(held, box - 20), "label");
    }
    for (let index = 0; index < inBox; index++) {
      const place = [left + 6 + (index % across) * cell, top + head + Math.floor(index / across) * tall];
      rankCell(svg, choice, first + index, axes, [...place, cell, tall]);
    }
  }
  if (more || cut) {
    const rest = [cut ? "the rest of this node" : "", more ? `${plural(more, "more node")}` : ""].filter(Boolean);
    const from = (nodes - 1) * inNode + inBox;
    svg.text(0, svg.height - 6, `\u2026 ${rest.join(" and ")}: ranks ${span(from, gpus - 1)}`, "muted");
  }
  return svg;
}

function rankCell(svg, choice, rank, axes, [x, y, width, height]) {
  const places = coordinates(choice, rank);
  const sizes = sizesOf(choice);
  const shard = shardOf(choice, places);
  const where = Object.entries(places).map(([axis, place]) => `${axis}=${place}`).join(", ");
  const kept = shard ? `; keeps shard ${shard[0]} of ${shard[1]}` : "";
  svg.open("rank", { rank });
  svg.rect([x + 2, y + 2, width - 4, height - 4], "rank-cell", { title: `rank ${rank}: ${where}${kept}`, radius: 4 });
  svg.text(x + width / 2, y + 17, `${rank}`, "num rank-number", "middle");
  const chip = (width - 10) / axes.length;
  axes.forEach((axis, index) => {
    const shade = Math.floor((places[axis] * SHADES) / Math.max(SHADES, sizes[axis])) % SHADES;
    const left = x + 5 + index * chip;
    svg.rect([left, y + 23, chip - 1, 15], `chip f-${data.axes[axis]} s${shade}`, { radius: 2 });
    svg.text(left + (chip - 1) / 2, y + 34.5, `${places[axis]}`, `chip-text c-${data.axes[axis]}`, "middle");
  });
  if (shard) {
    const room = width - 11;
    const wide = Math.max(3, room / shard[1]);
    svg.rect([x + 5, y + 41, room, 4], "shards");
    svg.rect([x + 5 + (room - wide) * (shard[1] > 1 ? shard[0] / (shard[1] - 1) : 0), y + 41, wide, 4], "shard f-optimizer");
  }
  svg.close();
}
