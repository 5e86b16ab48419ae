// Shapes of one diagram, as text. Each part of the time or memory has one colour in all diagrams, from the style sheet.

const CHARACTER = 0.56; // mean width of a character, relative to the font size
const BOLD = 0.65; // the same of a bold one
const textWidth = (words, size, character = CHARACTER) => character * size * words.length;
const at2 = (value) => Math.round(100 * value) / 100;

// Rectangles of a few kinds, drawn as one path for each kind, since a browser takes long for thousands of elements.
class Rects {
  paths = new Map();
  titles = []; // as [left, top, right, bottom, function that returns the title]

  add([x, y, width, height], kind, title = null) {
    const wide = at2(Math.max(0, width));
    if (!this.paths.has(kind)) this.paths.set(kind, []);
    this.paths.get(kind).push(`M${at2(x)} ${at2(y)}h${wide}v${at2(height)}h-${wide}z`);
    if (title) this.titles.push([x, y, x + width, y + height, title]);
  }
}

const titlesOf = new Map(); // by the picture's identifier

// Returns the title of the topmost rectangle at a place of a picture, or nothing.
function titleAt(ident, x, y) {
  const found = titlesOf.get(ident)?.findLast(([left, top, right, bottom]) => left <= x && x < right && top <= y && y < bottom);
  return found ? found[4]() : "";
}

class Svg {
  constructor({ ident, width, height = 0, title, description }) {
    Object.assign(this, { ident, width, height, title, description, parts: [] });
    titlesOf.set(ident, []);
  }

  rect([x, y, width, height], kind, { title = "", radius = 0 } = {}) {
    const corner = radius ? ` rx="${at2(radius)}"` : "";
    const size = `x="${at2(x)}" y="${at2(y)}" width="${at2(Math.max(0, width))}" height="${at2(height)}"`;
    this.add(`<rect ${size}${corner} class="${kind}"`, "rect", title);
  }

  // A rectangle in a part's colour, hatched if the part is not useful work.
  part(box, name, { title = "" } = {}) {
    this.rect(box, `part f-${name}`, { title });
    if (data.hatched.includes(name)) this.rect(box, "hatch");
  }

  // The group's title is looked up when the pointer is over one of the rectangles.
  rects({ paths, titles }) {
    this.parts.push('<g class="rects"><title></title>');
    for (const [kind, path] of paths) this.path(path.join(""), kind);
    this.close();
    titlesOf.get(this.ident).push(...titles);
  }

  text(x, y, words, kind = "", anchor = "start") {
    const where = anchor === "start" ? "" : ` text-anchor="${anchor}"`;
    this.parts.push(`<text x="${at2(x)}" y="${at2(y)}"${where} class="${kind}">${escape(words)}</text>`);
  }

  path(path, kind, { title = "" } = {}) {
    this.add(`<path d="${path}" class="${kind}"`, "path", title);
  }

  line(x1, y1, x2, y2, kind) {
    this.path(`M${at2(x1)} ${at2(y1)}L${at2(x2)} ${at2(y2)}`, kind);
  }

  open(kind, values = {}) {
    const all = Object.entries(values).map(([key, value]) => ` data-${key}="${escape(value)}"`);
    this.parts.push(`<g class="${kind}"${all.join("")}>`);
  }

  close() {
    this.parts.push("</g>");
  }

  add(start, tag, title) {
    this.parts.push(title ? `${start}><title>${escape(title)}</title></${tag}>` : `${start}/>`);
  }

  toString() {
    const size = `viewBox="0 0 ${at2(this.width)} ${at2(this.height)}" width="${at2(this.width)}"`;
    const names = `aria-labelledby="${this.ident}-title" aria-describedby="${this.ident}-desc"`;
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" id="${this.ident}" role="img" ${size} ${names}>` +
      `<title id="${this.ident}-title">${escape(this.title)}</title>` +
      `<desc id="${this.ident}-desc">${escape(this.description)}</desc>${this.parts.join("")}</svg>`
    );
  }
}
