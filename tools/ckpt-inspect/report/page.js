"use strict";
(() => {
// The data that ckpt-inspect wrote. Its names come from a file that anybody may have made. So the
// page shows names only as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- Words and numbers

// Returns text in which invisible characters, and those that change the writing direction, are
// escapes.
const shown = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const exact = (count) => count.toLocaleString("en-US");
const counted = (count, noun, plural = noun + "s") => `${exact(count)} ${count === 1 ? noun : plural}`;

function size(nbytes) {
  if (nbytes < 1024) return counted(nbytes, "byte");
  const power = Math.min(6, Math.floor(Math.log2(nbytes) / 10));
  return (nbytes / 1024 ** power).toFixed(1) + " " + "KMGTPE"[power - 1] + "iB";
}

function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const magnitude = Math.abs(x);
  const isPlain = magnitude < 1e6 && (magnitude >= 1e-3 || x === 0);
  const text = Number.isInteger(x) && isPlain ? String(x)
    : isPlain ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 1).replace("e+", "e");
  return text.replaceAll("-", "−");
}

function share(count, total) {
  if (count === 0 || total === 0) return "0";
  const percent = 100 * count / total;
  if (percent < 0.1) return "<0.1%";
  if (count !== total && percent > 99.9) return ">99.9%";
  return count === total ? "100%" : percent.toFixed(1) + "%";
}

const shape = (sizes) => `[${sizes.join(", ")}]`;
const numInf = (numbers) => numbers.positive_inf + numbers.negative_inf;
const isAlarming = (numbers) => numbers !== undefined && numbers.nan + numInf(numbers) > 0;

// ---- Elements

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "click") element.addEventListener("click", value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const tip = $("tip");
// Shows `text(event)` beside the pointer while the pointer is over `element`. Shows nothing if the
// text is empty.
function giveTip(element, text) {
  element.addEventListener("pointermove", (event) => {
    const words = text(event);
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words.length > 400 ? words.slice(0, 200) + " … " + words.slice(-200) : words;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(8, left) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  });
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
}

const kLevels = "·▁▂▃▄▅▆▇█";  // as `ckpt-inspect layout` draws shares
const levels = (shares) => Array.from(shares, (c) => Math.max(0, kLevels.indexOf(c)));
const opacity = (level) => 0.2 + 0.8 * level / (kLevels.length - 1);

function strip(shares) {
  const cells = levels(shares).map((level) =>
    level === 0 ? make("i") : make("i", {class: "held", style: {opacity: opacity(level)}}));
  return make("div", {class: "strip" + (cells.length > 24 ? " dense" : "")}, ...cells);
}

// Draws counts as bars that together are `width` wide.
function histogram(counts, width, height) {
  const kNs = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(kNs, "svg");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const largest = Math.max(1, ...counts);
  const step = width / Math.max(1, counts.length);
  const gap = step > 5 ? 1 : 0;
  let path = "";
  if (counts.length === 1) path = `M${width * 0.45} ${height}v${-height}h${width * 0.1}v${height}z`;  // all numbers are equal
  else counts.forEach((count, i) => {
    if (count === 0) return;
    const bar = Math.max(1, count / largest * height);
    path += `M${(i * step).toFixed(2)} ${height}v${(-bar).toFixed(2)}h${(step - gap).toFixed(2)}v${bar.toFixed(2)}z`;
  });
  const bars = document.createElementNS(kNs, "path");
  bars.setAttribute("d", path);
  svg.append(bars);
  return svg;
}

// ---- A table that makes elements only for the visible rows

class Table {
  static kRowHeight = 32;

  // A column has a title and `cell(row)` (text or an element). Optional: a width (without one, the
  // column takes the room that is left), `key(row)` to sort by, and a class.
  constructor(container, columns) {
    this.columns = columns;
    this.rows = [];
    this.sorted = null;  // the column to sort by
    this.descending = false;
    this.head = make("div", {class: "head", role: "row"});
    this.space = make("div", {style: {position: "relative"}});
    this.scroll = make("div", {class: "scroll", role: "rowgroup"}, this.space);
    this.scroll.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.scroll);
    container.replaceChildren(this.head, this.scroll);
  }

  show(rows) {
    this.rows = rows;
    this.sort();
  }

  sort() {
    const column = this.sorted;
    this.order = column === null ? this.rows : this.rows.map((row) => [column.key(row), row])
      .sort(([a], [b]) => Table.compare(a, b) * (this.descending ? -1 : 1)).map(([, row]) => row);
    this.drawHead();
    this.scroll.scrollTop = 0;
    this.draw();
  }

  // Rows without a key come before all others.
  static compare(a, b) {
    if (a === b) return 0;
    if (a === null || a === undefined) return -1;
    if (b === null || b === undefined) return 1;
    return a < b ? -1 : 1;
  }

  sortBy(column) {
    if (this.sorted !== column) [this.sorted, this.descending] = [column, typeof column.key(this.rows[0] ?? {}) !== "string"];
    else if (this.descending === (typeof column.key(this.rows[0] ?? {}) !== "string")) this.descending = !this.descending;
    else this.sorted = null;
    this.sort();
  }

  cell(column, content, role) {
    const cell = make("div", {role, class: `cell ${column.width ? "" : "grow"} ${column.class ?? ""}`}, content);
    if (column.width) cell.style.width = column.width + "px";
    return cell;
  }

  drawHead() {
    this.head.replaceChildren(...this.columns.map((column) => {
      const mark = column !== this.sorted ? "" : this.descending ? " ↓" : " ↑";
      const title = column.key ? make("button", {click: () => this.sortBy(column)}, column.title + mark) : column.title;
      return this.cell(column, title, "columnheader");
    }));
  }

  draw() {
    const height = Table.kRowHeight;
    this.space.style.height = this.order.length * height + "px";
    if (this.order.length === 0) {
      this.space.replaceChildren(make("div", {class: "empty"}, "Nothing here."));
      this.space.style.height = "";
      return;
    }
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / height) - 8);
    const last = Math.min(this.order.length, Math.ceil((this.scroll.scrollTop + (this.scroll.clientHeight || 640)) / height) + 8);
    const drawn = [];
    for (let i = first; i < last; ++i) {
      const row = this.order[i];
      drawn.push(make("div", {class: "row", role: "row", style: {top: i * height + "px", height: height + "px"}},
        ...this.columns.map((column) => this.cell(column, column.cell(row), "cell"))));
    }
    this.space.replaceChildren(...drawn);
  }
}

// A name as a button. If the name does not fit, its beginning is cut.
function nameButton(row, open, isState = false) {
  const name = shown(row.name);
  const cut = name.lastIndexOf(".") + 1;
  const nodes = isState ? [] : [make("span", {class: "prefix"}, make("bdi", {dir: "ltr"}, name.slice(0, cut)))];
  nodes.push(make("span", {class: "last"}, name.slice(cut) || "(empty name)"));
  if (isAlarming(row.numbers)) nodes.push(make("span", {class: "flag"}, row.numbers.nan > 0 ? "NaN" : "Inf"));
  const button = make("button", {class: "name" + (isState ? " state" : ""), title: name}, ...nodes);
  if (open) button.addEventListener("click", () => open(row));
  return button;
}

// ---- Details of one row

function showDetails(...content) {
  $("details-content").replaceChildren(...content);
  if (!$("details").open) $("details").showModal();
  $("details").scrollTop = 0;
}
$("close").addEventListener("click", () => $("details").close());
$("details").addEventListener("click", (event) => { if (event.target === $("details")) $("details").close(); });

function histogramWithAxis(numbers) {
  if (numbers.histogram.counts.length === 0) return make("p", {class: "hint"}, numbers.numel === 0 ? "No elements." : "No finite number.");
  const {begin, end, counts} = numbers.histogram;
  // As many digits as neighbouring edges need to differ.
  const edge = (i, digits) => number(i === counts.length ? end : begin + (end - begin) * i / counts.length, digits);
  let digits = 3;
  while (digits < 17 && counts.some((_, i) => edge(i, digits) === edge(i + 1, digits))) ++digits;
  const svg = histogram(counts, 420, 90);
  svg.setAttribute("width", "100%");
  giveTip(svg, (event) => {
    const box = svg.getBoundingClientRect();
    const bin = Math.min(counts.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * counts.length)));
    return `${edge(bin, digits)} to ${edge(bin + 1, digits)}: ${exact(counts[bin])} (${share(counts[bin], numbers.numel)})`;
  });
  return make("div", null, svg, make("div", {class: "axis"}, make("span", null, edge(0, digits)), make("span", null, edge(counts.length, digits))));
}

const kStatistics = [
  ["min", (n) => number(n.min)], ["max", (n) => number(n.max)],
  ["mean", (n) => number(n.mean)], ["std", (n) => number(n.std)],
  ["zeros", (n) => share(n.zeros, n.numel)], ["NaN", (n) => exact(n.nan), (n) => n.nan > 0],
  ["+Inf", (n) => exact(n.positive_inf), (n) => n.positive_inf > 0], ["−Inf", (n) => exact(n.negative_inf), (n) => n.negative_inf > 0],
];

// One definition list with a column for each of the `sides`.
function statistics(...sides) {
  const list = make("dl", sides.length > 1 ? {class: "pair"} : null);
  if (sides.length > 1) list.append(make("dt", null, ""), make("dt", null, "A"), make("dt", null, "B"));
  for (const [title, words, isBad] of kStatistics) {
    list.append(make("dt", null, title));
    for (const side of sides) list.append(make("dd", isBad?.(side) ? {class: "bad"} : null, words(side)));
  }
  return list;
}

// ---- A checkpoint

function showCheckpoint() {
  const {source, tensors} = data;
  const hasNumbers = tensors.some((tensor) => tensor.numbers);
  const state = {prefix: "", words: [], alarmsOnly: false};

  document.title = shown(source.name);
  $("kicker").textContent = source.format;
  $("title").textContent = shown(source.name);
  const tiles = [[exact(source.tensors), source.tensors === 1 ? "tensor" : "tensors"], [size(source.nbytes), exact(source.nbytes) + " bytes"],
                 [exact(source.numel), "elements"], [exact(source.pieces), "pieces"]];
  if (source.aliases) tiles.push([exact(source.aliases), source.aliases === 1 ? "alias" : "aliases"]);
  if (source.values) tiles.push([exact(source.values), source.values === 1 ? "value" : "values"]);
  const numAlarming = tensors.filter((tensor) => isAlarming(tensor.numbers)).length;
  if (hasNumbers) tiles.push([exact(numAlarming), "with NaN or Inf", numAlarming > 0 ? "bad" : "good"]);
  $("tiles").append(...tiles.map(([count, noun, tone]) => make("li", null, make("b", {class: tone ?? ""}, count), make("span", null, noun))));

  const byName = new Map(tensors.map((tensor) => [tensor.name, tensor]));
  for (const tensor of tensors) {
    tensor.weight = byName.get(tensor.parameter) ?? null;  // of optimizer state: the tensor of its parameter
    if (tensor.weight !== null) (tensor.weight.states ??= []).push(tensor);
  }
  const besideWeights = tensors.filter((tensor) => !tensor.weight).flatMap((tensor) => [tensor, ...(tensor.states ?? [])]);

  function openTensor(tensor) {
    const weight = tensor.weight ?? tensor;
    const family = [weight, ...(weight.states ?? [])];
    const card = (each) => {
      const title = each === weight ? (family.length > 1 ? "weight" : null) : each.name.slice(each.name.lastIndexOf(".") + 1);
      const nodes = [];
      if (title) nodes.push(make("h4", each === tensor ? null : {class: "hint"}, shown(title)));
      nodes.push(make("p", {class: "hint"}, `${each.dtype} ${shape(each.shape)}, ${counted(each.nbytes, "byte")}` + (each.nbytes < 1024 ? "" : ` (${size(each.nbytes)})`)));
      nodes.push(make("p", {class: "hint"}, `${each.layout}, ${counted(each.pieces, "piece")}` + (each.kind ? `, ${each.kind} state` : "")));
      if (each.quantized) nodes.push(make("p", {class: "hint"}, shown(each.quantized)));
      if (data.ranks.length > 1) nodes.push(strip(each.shares));
      if (each.numbers) nodes.push(make("div", {style: {marginTop: "10px"}}, histogramWithAxis(each.numbers)), statistics(each.numbers));
      return make("div", {class: "card"}, ...nodes);
    };
    const aliases = data.aliases.filter((alias) => alias.alias_of === weight.name);
    const also = aliases.length === 0 ? [] : [make("p", {class: "hint"}, "Also named " + aliases.map((alias) => shown(alias.name)).join(", "))];
    showDetails(make("h3", null, shown(weight.name)), ...also, ...family.map(card));
  }

  // -- The treemap

  function makeTree() {
    const root = {label: "", name: "", nbytes: 0, children: new Map()};
    for (const tensor of tensors) {
      if (tensor.nbytes === 0) continue;
      let node = root;
      node.nbytes += tensor.nbytes;
      for (const label of tensor.name.split(".")) {
        let child = node.children.get(label);
        if (child === undefined) {
          const name = node === root ? label : node.name + "." + label;
          child = {label, name, nbytes: 0, children: new Map()};
          node.children.set(label, child);
        }
        node = child;
        node.nbytes += tensor.nbytes;
      }
      node.tensor = tensor;
    }
    return root;
  }

  // The children to draw: the largest first, those of equal size by name. A child with a single
  // child is joined with it.
  function childrenOf(node) {
    const children = Array.from(node.children.values(), (child) => {
      let label = child.label;
      while (child.children.size === 1 && !child.tensor) {
        child = child.children.values().next().value;
        label += "." + child.label;
      }
      return {node: child, label, nbytes: child.nbytes};
    });
    if (node.tensor && node.children.size > 0) {
      const itself = {name: node.name, tensor: node.tensor, nbytes: node.tensor.nbytes, children: new Map()};
      children.push({node: itself, label: "(itself)", nbytes: itself.nbytes});
    }
    return children.sort((a, b) => b.nbytes - a.nbytes || a.label.localeCompare(b.label, "en", {numeric: true}));
  }

  // Divides a rectangle among the items by their bytes. Places rows of items along the shorter
  // side. A row gets more items as long as its items become squarer (Bruls, Huizing, van Wijk).
  function squarify(items, {x, y, width, height}) {
    const placed = [];
    let left = items.reduce((sum, item) => sum + item.nbytes, 0);
    let begin = 0;
    while (begin < items.length && width > 0 && height > 0) {
      const side = Math.min(width, height);
      const scale = width * height / left;
      let end = begin, sum = 0, worst = Infinity;
      while (end < items.length) {
        const next = sum + items[end].nbytes;
        const across = next * scale / side;
        const ratio = (item) => { const along = item.nbytes * scale / across; return Math.max(along / across, across / along); };
        const nextWorst = Math.max(ratio(items[begin]), ratio(items[end]));
        if (nextWorst > worst) break;
        [sum, worst] = [next, nextWorst];
        ++end;
      }
      const across = sum * scale / side;
      let along = 0;
      for (const item of items.slice(begin, end)) {
        const length = item.nbytes * scale / across;
        placed.push(width >= height ? {item, x, y: y + along, width: across, height: length}
                                    : {item, x: x + along, y, width: length, height: across});
        along += length;
      }
      if (width >= height) [x, width] = [x + across, width - across];
      else [y, height] = [y + across, height - across];
      left -= sum;
      begin = end;
    }
    return placed;
  }

  const root = makeTree();
  const kHues = [214, 32, 152, 268, 346, 54, 188, 112];
  const kMaxDepth = 3;
  const kTitleHeight = 17;

  // If `hue` is null, each sibling gets a hue of its own. Otherwise all get `hue`.
  function drawBoxes(into, node, area, depth, hue) {
    const placed = squarify(childrenOf(node), area);
    placed.forEach(({item, x, y, width, height}, i) => {
      if (width < 1.5 || height < 1.5) return;
      const child = item.node;
      const ownHue = hue ?? kHues[i % kHues.length];
      const isTensor = child.children.size === 0;
      const box = make("button", {class: "box", style: {left: x + "px", top: y + "px", width: width - 1 + "px", height: height - 1 + "px"},
        click: () => isTensor ? openTensor(child.tensor) : zoom(child.name)});
      box.style.setProperty("--hue", ownHue);
      box.style.setProperty("--depth", depth);
      const label = shown(item.label);
      if (width > Math.min(60, 9 + 7 * label.length) && height > 17) box.append(label);
      if (width > 70 + 7 * label.length && height > 17) box.append(make("small", null, size(item.nbytes)));
      giveTip(box, () => `${shown(child.name)}: ${size(item.nbytes)}, ${share(item.nbytes, root.nbytes)} of all` +
        (isTensor ? `; ${child.tensor.dtype} ${shape(child.tensor.shape)}` : ""));
      into.push(box);
      const inner = {x: x + 2, y: y + kTitleHeight, width: width - 5, height: height - kTitleHeight - 3};
      const isRoomy = inner.width * inner.height / Math.max(1, child.children.size) > 220 && inner.width > 30 && inner.height > 18;
      if (!isTensor && isRoomy && depth + 1 < kMaxDepth) drawBoxes(into, child, inner, depth + 1, placed.length > 1 ? ownHue : hue);
    });
  }

  function nodeAt(prefix) {
    let node = root;
    for (const label of prefix === "" ? [] : prefix.split(".")) node = node.children.get(label);
    return node;
  }

  function drawTreemap() {
    const map = $("treemap");
    const boxes = [];
    drawBoxes(boxes, nodeAt(state.prefix), {x: 0, y: 0, width: map.clientWidth, height: map.clientHeight}, 0, null);
    map.replaceChildren(...boxes);
    const labels = state.prefix === "" ? [] : state.prefix.split(".");
    const path = [make("button", {click: () => zoom("")}, "all")];
    labels.forEach((label, i) => path.push(make("i", null, i === 0 ? "›" : "."),
      make("button", {click: () => zoom(labels.slice(0, i + 1).join("."))}, shown(label))));
    path.push(make("i", null, " " + size(nodeAt(state.prefix).nbytes)));
    $("path").replaceChildren(...path);
  }

  function zoom(prefix) {
    state.prefix = prefix;
    tip.hidden = true;
    drawTreemap();
    select();
  }

  if (root.nbytes > 0) {
    $("prefixes").hidden = false;
    new ResizeObserver(drawTreemap).observe($("treemap"));
  }

  // -- Dtypes

  const dtypes = new Map();
  for (const tensor of tensors) {
    const sum = dtypes.get(tensor.dtype) ?? {dtype: tensor.dtype, nbytes: 0, count: 0};
    sum.nbytes += tensor.nbytes;
    ++sum.count;
    dtypes.set(tensor.dtype, sum);
  }
  $("dtypes").hidden = dtypes.size === 0;
  const bySize = [...dtypes.values()].sort((a, b) => b.nbytes - a.nbytes);
  for (const {dtype, nbytes, count} of bySize) {
    $("dtype-bars").append(make("span", null, dtype),
      make("div", {class: "track"}, make("div", {style: {width: 100 * nbytes / Math.max(1, bySize[0].nbytes) + "%"}})),
      make("span", {class: "number"}, size(nbytes)), make("span", {class: "number hint"}, counted(count, "tensor")));
  }

  // -- The map of ranks: a line for each tensor, above it the bytes of each rank

  const kBarsHeight = 44;
  const kMaxMapHeight = 180;
  const mapRows = () => table.order;
  const cellsOf = (tensor) => tensor.levels ??= levels(tensor.shares);

  function drawRankMap() {
    const canvas = $("rank-map");
    const rows = mapRows();
    const lineHeight = Math.max(1, Math.min(10, Math.floor(kMaxMapHeight / Math.max(1, rows.length))));
    const numLines = Math.min(rows.length, kMaxMapHeight);
    const height = kBarsHeight + 6 + Math.max(1, numLines) * lineHeight;
    const width = canvas.clientWidth;
    const ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const [fill, line] = [style.getPropertyValue("--shape"), style.getPropertyValue("--line")];
    const numRanks = data.ranks.length;
    const largest = Math.max(1, ...data.ranks);
    context.fillStyle = fill;
    data.ranks.forEach((nbytes, rank) => {
      const bar = nbytes / largest * kBarsHeight;
      const begin = rank * width / numRanks, end = (rank + 1) * width / numRanks;
      context.fillRect(begin, kBarsHeight - bar, Math.max(0.5, end - begin - (numRanks > 64 ? 0 : 1)), bar);
    });
    const numCells = Math.ceil(numRanks / data.ranks_per_share);
    for (let i = 0; i < numLines; ++i) {
      // If several tensors share a line, it shows the mean of their shares.
      const merged = new Array(numCells).fill(0);
      const begin = Math.floor(i * rows.length / numLines), end = Math.floor((i + 1) * rows.length / numLines);
      for (let r = begin; r < end; ++r) cellsOf(rows[r]).forEach((level, c) => { merged[c] += level / (end - begin); });
      merged.forEach((level, c) => {
        const left = c * data.ranks_per_share * width / numRanks;
        const right = Math.min(width, (c + 1) * data.ranks_per_share * width / numRanks);
        context.fillStyle = level === 0 ? line : fill;
        context.globalAlpha = level === 0 ? 0.6 : opacity(level);
        context.fillRect(left, kBarsHeight + 6 + i * lineHeight, right - left - (numCells > 64 ? 0 : 1), lineHeight > 3 ? lineHeight - 1 : lineHeight);
      });
      context.globalAlpha = 1;
    }
    canvas.lineHeight = lineHeight;
    canvas.numLines = numLines;
  }

  function rowAt(event) {
    const canvas = $("rank-map");
    const y = event.clientY - canvas.getBoundingClientRect().top - kBarsHeight - 6;
    const i = Math.floor(y / canvas.lineHeight);
    return y < 0 || i >= canvas.numLines ? null : mapRows()[Math.floor(i * mapRows().length / canvas.numLines)];
  }

  function showRankMap() {
    if (data.ranks.length < 2) return;
    $("ranks").hidden = false;
    const canvas = $("rank-map");
    const smallest = Math.min(...data.ranks), largest = Math.max(...data.ranks);
    $("ranks-hint").textContent = `${exact(data.ranks.length)} ranks from left to right: the bytes of each (` +
      (size(smallest) === size(largest) ? size(largest) : `${size(smallest)} to ${size(largest)}`) +
      "), then a line for each tensor, darker where a rank holds more of it";
    giveTip(canvas, (event) => {
      const rank = Math.min(data.ranks.length - 1, Math.max(0, Math.floor((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth * data.ranks.length)));
      const tensor = rowAt(event);
      return tensor === null ? `rank ${rank}: ${size(data.ranks[rank])}` : `rank ${rank}; ${shown(tensor.name)}: ${tensor.layout}`;
    });
    canvas.addEventListener("click", (event) => { const tensor = rowAt(event); if (tensor) openTensor(tensor); });
    new ResizeObserver(drawRankMap).observe($("ranks"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawRankMap);
  }

  // -- The table

  const numberColumn = (title, key, words, width = 74, isBad = () => false) => ({
    title, width, class: "number wide", key: (row) => row.numbers ? key(row.numbers) : null,
    cell: (row) => !row.numbers ? "–" : isBad(row.numbers) ? make("span", {class: "bad"}, words(row.numbers)) : words(row.numbers),
  });
  const columns = [
    {title: "name", key: (row) => row.name, cell: (row) => nameButton(row, openTensor, row.weight && table.sorted === null)},
    {title: "dtype", width: 104, class: "medium", key: (row) => row.dtype, cell: (row) => row.dtype + (row.quantized?.startsWith("codes") ? " (codes)" : "")},
    {title: "shape", width: 104, class: "medium", cell: (row) => shape(row.shape)},
    {title: "bytes", width: 72, class: "number", key: (row) => row.nbytes, cell: (row) => size(row.nbytes)},
  ];
  if (data.ranks.length > 1) columns.push({title: "ranks", width: 96, class: "medium", key: (row) => row.layout, cell: (row) => strip(row.shares)});
  if (hasNumbers) {
    columns.push({title: "histogram", width: 96, class: "plot", cell: (row) => row.numbers ? histogram(row.numbers.histogram.counts, 96, 24) : ""},
      numberColumn("min", (n) => n.min, (n) => number(n.min)), numberColumn("max", (n) => n.max, (n) => number(n.max)),
      numberColumn("mean", (n) => n.mean, (n) => number(n.mean)), numberColumn("std", (n) => n.std, (n) => number(n.std)),
      numberColumn("zeros", (n) => n.numel ? n.zeros / n.numel : null, (n) => share(n.zeros, n.numel), 48),
      numberColumn("NaN", (n) => n.nan, (n) => exact(n.nan), 40, (n) => n.nan > 0),
      numberColumn("Inf", numInf, (n) => exact(numInf(n)), 40, (n) => numInf(n) > 0));
  }
  const table = new Table($("table"), columns);

  function select() {
    const below = state.prefix + ".";
    const rows = besideWeights.filter((tensor) => {
      if (state.prefix !== "" && tensor.name !== state.prefix && !tensor.name.startsWith(below)) return false;
      if (state.alarmsOnly && !isAlarming(tensor.numbers)) return false;
      const text = `${tensor.name} ${tensor.dtype} ${tensor.layout} ${tensor.kind ?? ""}`.toLowerCase();
      return state.words.every((word) => text.includes(word));
    });
    table.show(rows);
    $("num-shown").textContent = rows.length === tensors.length ? "" : `${exact(rows.length)} of ${exact(tensors.length)}`;
    if (!$("ranks").hidden) drawRankMap();
  }

  $("rows-title").textContent = "Tensors";
  $("filter").addEventListener("input", () => {
    state.words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    select();
  });
  $("alarm-only").hidden = numAlarming === 0;
  $("alarm-only").addEventListener("change", (event) => {
    state.alarmsOnly = event.target.checked;
    select();
  });
  showRankMap();
  select();

  const others = [...data.values, ...data.aliases.map((alias) => ({name: alias.name, type: "alias", text: "= " + alias.alias_of}))];
  if (others.length > 0) {
    $("values").hidden = false;
    $("values-title").textContent = counted(data.values.length, "value") +
      (data.aliases.length ? ", " + counted(data.aliases.length, "alias", "aliases") : "");
    new Table($("values-table"), [
      {title: "name", key: (row) => row.name, cell: (row) => nameButton(row)},
      {title: "type", width: 60, key: (row) => row.type, cell: (row) => row.type},
      {title: "value", cell: (row) => { const text = shown(row.text); return make("span", {title: text}, text); }},
    ]).show(others);
  }
}

// ---- Two checkpoints

function showComparison() {
  const {a, b, differences, compared} = data;
  document.title = `${shown(a.name)} and ${shown(b.name)}`;
  $("kicker").textContent = `A: ${a.format}; B: ${b.format}`;
  $("title").textContent = `A ${shown(a.name)}, B ${shown(b.name)}`;
  const kinds = new Map();
  for (const {kind} of differences) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  const tiles = [[differences.length === 0 ? "equal" : exact(differences.length), differences.length === 0 ? "nothing differs" : differences.length === 1 ? "difference" : "differences",
                  differences.length === 0 ? "good" : "bad"]];
  for (const [kind, count] of kinds) tiles.push([exact(count), kind]);
  tiles.push([exact(compared.tensors), "tensors compared"], [exact(compared.values), "values compared"], [size(compared.nbytes), "compared"]);
  if (data.untied.length) tiles.push([exact(data.untied.length), "tied to other names in B"]);
  $("tiles").append(...tiles.map(([count, noun, tone]) => make("li", null, make("b", {class: tone ?? ""}, count), make("span", null, noun))));

  const inWords = (row) => {
    if (row.kind === "elements") return `${exact(row.different)} of ${exact(row.numel)}, first at ${shape(row.first_index)}: ${row.first_a} → ${row.first_b}`;
    if (row.kind === "missing") return `${shown(row.a)}, only in A`;
    if (row.kind === "extra") return `${shown(row.b)}, only in B`;
    return `${shown(row.a)} → ${shown(row.b)}`;
  };
  // JSON has no infinity. Without an infinite difference, there is a number, unless all differing elements have NaN on one side.
  const largestDifference = (row) => row.max_abs_difference ?? (row.kind === "elements" && row.nan_on_one_side < row.different ? Infinity : null);
  function openDifference(row) {
    const content = [make("h3", null, shown(row.name)), make("p", null, inWords(row))];
    if (row.kind === "elements") {
      content.push(make("p", {class: "hint"}, `${row.a}` + (row.a === row.b ? "" : ` → ${row.b}`) + `; largest difference ${number(largestDifference(row))}`));
      if (row.nan_on_one_side) content.push(make("p", {class: "bad"}, `${exact(row.nan_on_one_side)} NaN on one side`));
    }
    for (const side of ["a", "b"]) {
      const words = row["quantized_" + side];
      if (words) content.push(make("p", {class: "hint"}, `${side.toUpperCase()}: ${shown(words)}`));
    }
    if (row.numbers_a) {
      for (const [side, numbers] of [["A", row.numbers_a], ["B", row.numbers_b]]) {
        content.push(make("div", {class: "card"}, make("h4", null, side), histogramWithAxis(numbers)));
      }
      content.push(make("div", {class: "card"}, statistics(row.numbers_a, row.numbers_b)));
    }
    showDetails(...content);
  }
  const columns = [
    {title: "kind", width: 70, key: (row) => row.kind, cell: (row) => make("span", {class: "bad"}, row.kind)},
    {title: "name", key: (row) => row.name, cell: (row) => nameButton({name: row.name, numbers: row.numbers_b}, openDifference.bind(null, row))},
    {title: "what differs", class: "medium", cell: (row) => { const text = inWords(row); return make("span", {title: text}, text); }},
    {title: "share", width: 60, class: "number", key: (row) => row.numel ? row.different / row.numel : null, cell: (row) => row.numel ? share(row.different, row.numel) : "–"},
    {title: "max |a−b|", width: 84, class: "number wide", key: largestDifference, cell: (row) => number(largestDifference(row))},
  ];
  if (differences.some((row) => row.numbers_a)) {
    for (const side of ["a", "b"]) {
      columns.push({title: side.toUpperCase(), width: 96, class: "wide",
        cell: (row) => row["numbers_" + side] ? histogram(row["numbers_" + side].histogram.counts, 96, 24) : ""});
    }
  }
  const table = new Table($("table"), columns);
  $("rows-title").textContent = "Differences";
  $("filter").placeholder = "Filter: words in a name or kind";
  const select = () => {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = differences.filter((row) => words.every((word) => `${row.name} ${row.kind}`.toLowerCase().includes(word)));
    table.show(rows);
    $("num-shown").textContent = rows.length === differences.length ? "" : `${exact(rows.length)} of ${exact(differences.length)}`;
  };
  $("filter").addEventListener("input", select);
  select();
}

if (data.differences) showComparison();
else showCheckpoint();
document.documentElement.dataset.drawn = "yes";
})();
