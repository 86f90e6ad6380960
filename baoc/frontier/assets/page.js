// Filters, sorts and draws what page.py has computed. Plotly is in the page already.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = {BAOC: ["#0b6bcb", "#58a6f0"], uniform: ["#d1700f", "#f09a4a"], "random feasible": ["#7a7f87", "#9aa1aa"]}; // on light, on dark
const SPARE = [["#2f8f4e", "#5cc17d"], ["#8b5cc2", "#b794e6"], ["#b3261e", "#f0776f"], ["#0f8b8d", "#47c2c4"], ["#a3870c", "#d9bd3f"], ["#c2528b", "#e88abb"],
  ["#5b6b1f", "#a6ba57"], ["#4a4fb5", "#8f94f0"]];
const TITLES = {state_share: "optimizer state, % of fp32 AdamW's", state_mib: "optimizer state, MiB", peak_mib: "peak memory, MiB", samples_per_s: "samples/s", risk: "predicted risk"};
const NARROW = window.innerWidth < 600;
const CONFIG = {displaylogo: false, displayModeBar: NARROW ? false : "hover", showSendToCloud: false, plotlyServerURL: "",
  toImageButtonOptions: {format: "png", scale: 2, filename: "frontier"}, modeBarButtonsToRemove: ["autoScale2d"]}; // a picture on this machine, and nothing to a server
const EDGE = NARROW ? 44 : 60;
const MAX_COLUMNS = 40, MAX_CURVES = 60; // of a figure: more cannot be distinguished, and take seconds to draw
const THEMES = ["auto", "light", "dark"];
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
const number = (value, digits = 4) => (value === null || value === undefined ? "n/a" : Number(value).toPrecision(digits));
const distinct = (values) => [...new Set(values)];
// Families in one order everywhere: BAOC's, those that it is compared with, then others as they come
const familiesOf = (points) => { const names = distinct(points.map((point) => point.family)); return distinct([...Object.keys(COLOURS).filter((name) => names.includes(name)), ...names]); };
// What is shown: a query, the labels of points in a brush, and ranges of the parallel axes; how rows are sorted, and which is open
const state = {brush: null, ranges: {}, sort: null, descending: false, open: null};

// One workload, with its points grouped by family or by the study that a run belongs to
const currentWorkload = () => data.workloads[byId("kind").value];
const comparedBy = () => (currentWorkload().study ? byId("by").value : "family");
const view = (workload, by = workload.study ? byId("by").value : "family") => (by === "study" ? {...workload, ...workload.study} : workload);

function colour(family) {
  const others = familiesOf(data.workloads.flatMap((workload) => view(workload).points)).filter((name) => !COLOURS[name]);
  return (COLOURS[family] || SPARE[others.indexOf(family) % SPARE.length])[isDark() ? 1 : 0];
}

function element(tag, properties = {}, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
}

function table(id, heads, rows, numeric = []) {
  const line = (values, tag) => element("tr", {}, ...values.map((value, at) => element(tag, {textContent: value, className: numeric.includes(at) ? "number" : ""})));
  byId(id).replaceChildren(line(heads, "th"), ...rows.map((values) => line(values, "td")));
  return byId(id);
}

const wrapped = (text) => text.replace(/(.{1,80})(\s|$)/g, "$1<br>").replace(/<br>$/, "");
const qualityTitle = (workload) => `${workload.quality}, ${workload.higher ? "higher" : "lower"} is better`;

// ---- what is shown

function columnsOf(workload) {
  const settings = workload.settings.map((name) => ({key: name, head: name, of: (p) => p.settings[name] ?? null, setting: true}));
  const numbers = [["quality", workload.quality, 4], ["interval", "± 95 %", 2], ["seeds", "seeds"], ["ranks", "ranks"], ["state_share", "state, %", 3], ["state_mib", "state, MiB", 3],
    ["peak_mib", "peak, MiB", 4], ["samples_per_s", "samples/s", 4]].map(([key, head, digits]) => ({key, head, digits, numeric: true, of: (p) => p[key]}));
  return [{key: "point", head: "point", of: (p) => p.short}, {key: comparedBy(), head: comparedBy(), of: (p) => p.family}, ...numbers, ...settings];
}

// Without columns in which no point has more to say than that there is one
const shownColumns = (workload) => {
  const says = {interval: (p) => p.interval !== null, ranks: (p) => p.ranks > 1};
  return columnsOf(workload).filter((column) => !says[column.key] || workload.points.some(says[column.key]));
};

const asNumber = (value) => (typeof value === "number" ? value : typeof value === "string" && value.trim() !== "" && isFinite(value) ? Number(value) : null);

// A test of points for a query: words that a row has, and comparisons of a column or setting, by its name or the end of it
function queryTest(workload, text) {
  const columns = columnsOf(workload);
  const tests = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, wanted] = word.match(/^([\w./]+)(<=|>=|<|>|=)(.+)$/) || [];
    const column = name && columns.find((c) => [c.key, c.head].some((own) => own.toLowerCase() === name || own.toLowerCase().endsWith(`.${name}`)));
    if (!column) return (p) => [p.label, p.short, p.family, p.basis, p.command, ...p.folders].join(" ").toLowerCase().includes(word);
    return (p) => {
      const own = column.of(p), [a, b] = [asNumber(own), asNumber(wanted)];
      if (sign === "=") return a !== null && b !== null ? a === b : String(own).toLowerCase() === wanted;
      return a !== null && b !== null && {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[sign];
    };
  });
  return (point) => tests.every((test) => test(point));
}

const inRanges = (point) => Object.values(state.ranges).every(({axis, ranges}) => ranges.some(([low, high]) => { const at = axis.place(point); return at !== null && low <= at && at <= high; }));

// Points that a figure shows; the figure that a brush or range was drawn in also shows those outside of it
function shownIn(workload, without = "") {
  const families = [...document.querySelectorAll("#families input:checked")].map((box) => box.value);
  const matches = queryTest(workload, byId("query").value);
  return workload.points.filter((p) => families.includes(p.family) && matches(p) && (without === "brush" || !state.brush || state.brush.has(p.label)) && (without === "ranges" || inRanges(p)));
}

// ---- figures

function plot(id, traces, layout) {
  const line = css("line"), axis = {gridcolor: line, linecolor: line, zerolinecolor: line, exponentformat: "e"};
  const axes = Object.fromEntries(["xaxis", "yaxis"].map((name) => [name, {...axis, ...layout[name]}]));
  return Plotly.react(id, traces, {width: byId(id).clientWidth, height: byId(id).clientHeight, margin: {l: EDGE, r: 12, t: 56, b: 48}, font: {color: css("text"), size: 12}, paper_bgcolor: css("ground"), plot_bgcolor: css("ground"), hoverlabel: {align: "left"},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: css("soft"), activecolor: css("link")}, legend: {orientation: "h", x: 0, y: 1.01, yanchor: "bottom"}, ...layout, ...axes}, CONFIG);
}

function hover(workload, point) {
  const spread = point.interval === null ? "" : ` ± ${number(point.interval, 2)} (95 %, ${point.seeds} seeds)`;
  return `<b>${point.short}</b>, ${point.family}<br>${workload.quality} ${number(point.quality)}${spread}<br>state ${number(point.state_mib, 3)} MiB (${number(point.state_share, 3)} % of fp32 AdamW's), peak ` +
    `${number(point.peak_mib)} MiB<br>${number(point.samples_per_s)} samples/s${point.basis ? `<br>chosen by ${wrapped(point.basis)}` : ""}<br>${wrapped(point.command)}`;
}

function front(workload, points, axis) {
  const sign = workload.higher ? -1 : 1, axisSign = axis === "samples_per_s" ? -1 : 1;
  const better = (a, b) => sign * a.quality <= sign * b.quality && axisSign * a[axis] <= axisSign * b[axis] && (a.quality !== b.quality || a[axis] !== b[axis]);
  return points.filter((point) => point.quality !== null && !points.some((other) => other.quality !== null && better(other, point))).sort((a, b) => a[axis] - b[axis]);
}

// A logarithmic axis with a tick at 1, 2 and 5 of each decade, or at more if the values span little
function logAxis(values) {
  const positive = values.filter((value) => value > 0), [low, high] = [Math.min(...positive), Math.max(...positive)];
  const digits = high > 8 * low ? [1, 2, 5] : high > 1.5 * low ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : [];
  if (!positive.length || !digits.length) return {type: "log", nticks: 5, exponentformat: "none"};
  const ticks = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade++) ticks.push(...digits.map((digit) => Number((digit * 10 ** decade).toPrecision(2))));
  return {type: "log", tickvals: ticks, ticktext: ticks.map((tick) => (tick >= 1e-4 && tick < 1e6 ? String(tick) : tick.toExponential()))};
}

// Markers of each family; those outside of the brush are faded
function markers(workload, points, x) {
  return familiesOf(points).map((family) => {
    const members = points.filter((point) => point.family === family && point.quality !== null && x(point) !== null);
    return {x: members.map(x), y: members.map((p) => p.quality), name: family, mode: "markers", text: members.map((p) => hover(workload, p)), hoverinfo: "text", customdata: members.map((p) => p.label),
      error_y: {type: "data", array: members.map((p) => p.interval || 0), thickness: 1, width: 3, visible: members.some((p) => p.interval)},
      selectedpoints: state.brush ? members.map((p, at) => (state.brush.has(p.label) ? at : -1)).filter((at) => at >= 0) : null, unselected: {marker: {opacity: 0.15}},
      marker: {color: colour(family), size: members.map((p) => (p.label === state.open ? 15 : 9)), symbol: members.map((p) => (p.dominated ? "circle-open" : "circle"))}};
  });
}

function scatter(workload) {
  const axis = byId("axis").value, points = shownIn(workload, "brush");
  const lines = familiesOf(points).map((family) => {
    const familyFront = front(workload, points.filter((point) => point.family === family), axis);
    return {x: familyFront.map((p) => p[axis]), y: familyFront.map((p) => p.quality), mode: "lines", line: {color: colour(family), width: 1.5, shape: axis === "samples_per_s" ? "vh" : "hv"}, hoverinfo: "skip", showlegend: false};
  });
  const knee = kneeOf(workload, axis);
  const star = knee && points.includes(knee) ? [{x: [knee[axis]], y: [knee.quality], name: "knee", mode: NARROW ? "markers" : "markers+text", text: [knee.short], textposition: "top right", cliponaxis: false,
    hoverinfo: "skip", marker: {size: 20, symbol: "star-open", color: css("text"), line: {width: 2}}}] : [];
  const axisLayout = axis === "samples_per_s" ? {type: "linear", nticks: 8} : logAxis(points.map((p) => p[axis]));
  return plot("scatter", [...lines, ...markers(workload, points, (p) => p[axis]), ...star],
    {xaxis: {title: {text: TITLES[axis]}, ...axisLayout}, yaxis: {title: {text: qualityTitle(workload)}}, dragmode: NARROW ? false : "select", uirevision: workload.name + axis});
}

function kneeOf(workload, axis) {
  const label = workload.knees[{state_share: "state_bytes", state_mib: "state_bytes", peak_mib: "peak_bytes"}[axis]];
  return workload.points.find((point) => point.label === label);
}

// A measure or setting as an axis: a number along doublings where it spans decades, else the place of its value
function axisOf(workload, key) {
  const of = workload.settings.includes(key) ? (p) => p.settings[key] ?? null : (p) => p[key];
  const values = workload.points.map(of).filter((value) => value !== null), numbers = values.map(asNumber);
  const title = key === "quality" ? workload.quality : key === "state_share" ? "state, % of AdamW's" : TITLES[key] || key;
  if (numbers.includes(null)) {
    const names = distinct(values.map(String)).sort((a, b) => a.localeCompare(b, undefined, {numeric: true}));
    return {title, names, place: (p) => (of(p) === null ? null : names.indexOf(String(of(p))))};
  }
  const positive = numbers.filter((value) => value > 0), log = key !== "quality" && Math.min(...numbers) >= 0 && Math.max(...numbers) > 20 * Math.min(...positive);
  const least = Math.min(...positive) / 2;
  return {title, log, place: (p) => { const value = asNumber(of(p)); return value === null ? null : log ? Math.log10(Math.max(value, least)) : value; }};
}

function slice(workload) {
  const key = byId("slice_by").value, axis = key && axisOf(workload, key);
  if (!axis) return plot("slice", [], {annotations: [{text: "All points have the same settings.", showarrow: false, font: {color: css("soft")}}]});
  // Points of a name lie beside each other: as many places as points, in the order of the points; one alone in the middle
  const points = shownIn(workload, "brush"), counts = {}, numbers = new Map();
  if (axis.names) workload.points.forEach((p) => { const at = axis.place(p); counts[at] = (counts[at] || 0) + 1; numbers.set(p, counts[at] - 1); });
  const beside = (p, at) => (counts[at] > 1 ? 0.5 * ((numbers.get(p) * 0.618 + 0.5) % 1) - 0.25 : 0);
  const x = (p) => { const at = axis.place(p); return at === null ? null : axis.log ? 10 ** at : at + beside(p, at); };
  return plot("slice", markers(workload, points, x), {xaxis: {title: {text: axis.title}, ...(axis.log ? logAxis(points.map(x)) : {type: "linear"}), ...(axis.names ? {tickvals: axis.names.map((_, at) => at), ticktext: axis.names.map((text) => text.slice(0, 24)), range: [-0.5, axis.names.length - 0.5]} : {})},
    yaxis: {title: {text: qualityTitle(workload)}}, dragmode: NARROW ? false : "select", uirevision: workload.name + key});
}

function importance(workload) {
  const shares = Object.entries(workload.importances).sort((a, b) => a[1] - b[1]);
  byId("importance").style.height = `${80 + 26 * shares.length}px`;
  return plot("importance", [{type: "bar", orientation: "h", x: shares.map(([, share]) => 100 * share), y: shares.map(([name]) => name), text: shares.map(([, share]) => `${(100 * share).toFixed(0)} %`), textposition: "outside",
    cliponaxis: false, hoverinfo: "skip", marker: {color: css("link")}}], {margin: {l: 200, r: 48, t: 24, b: 40}, xaxis: {title: {text: "share, %"}, rangemode: "tozero"}, yaxis: {ticklen: 4}});
}

function history(workload) {
  const group = comparedBy(), families = [...document.querySelectorAll("#families input:checked")].map((box) => box.value);
  const memoryAxis = byId("axis").value === "peak_mib" ? "peak_bytes" : "state_bytes";
  const lines = workload.histories.filter((line) => line.axis === memoryAxis && (families.includes(line.family) || (group === "family" && line.family === "all")));
  const places = (line) => (group === "study" ? line.runs.map((_, at) => at + 1) : line.runs);
  return plot("history", lines.map((line) => ({x: places(line), y: line.share, name: line.family, mode: "lines", line: {shape: "hv", width: line.family === "all" ? 2.5 : 1.5,
    color: line.family === "all" ? css("text") : colour(line.family)}, text: line.runs.map((at) => workload.runs[at - 1]), hovertemplate: "%{text}: %{y:.1f} %<extra>" + line.family + "</extra>"})),
  {xaxis: {title: {text: group === "study" ? "run number in its study" : "run number"}, dtick: workload.runs.length <= 20 ? 1 : undefined}, yaxis: {title: {text: "dominated area, %"}, rangemode: "tozero"}});
}

function parallel(workload) {
  const points = shownIn(workload, "ranges").filter((point) => point.quality !== null), families = familiesOf(points);
  const measured = workload.points.every((p) => p.basis.startsWith("measured: ")); // risk decided nothing
  const usable = (key) => !(key === "risk" && measured) && points.every((p) => p[key] !== null) && distinct(points.map((p) => p[key])).length > 1;
  const keys = ["quality", "state_share", "peak_mib", "samples_per_s", "risk"].filter(usable).concat(workload.settings.filter((name) => points.every((p) => (p.settings[name] ?? null) !== null)));
  const steps = families.flatMap((family, at) => [[at / families.length, colour(family)], [(at + 1) / families.length, colour(family)]]);
  const dimensions = keys.map((key) => {
    const axis = axisOf(workload, key), values = points.map(axis.place), kept = state.ranges[key]?.ranges;
    const names = axis.names && {tickvals: axis.names.map((_, at) => at), ticktext: axis.names.map((text) => text.slice(0, 18)), range: [-0.3, axis.names.length - 0.7]};
    const low = Math.min(...values), high = Math.max(...values), ticks = [...Array(5).keys()].map((at) => low + (at * (high - low)) / 4);
    const decades = axis.log && {tickvals: ticks, ticktext: ticks.map((at) => String(Number((10 ** at).toPrecision(2))))};
    return {label: axis.title.split(".").pop(), values, ...names, ...decades, ...(kept ? {constraintrange: kept} : {})};
  });
  const holder = byId("parallel");
  holder.style.minWidth = `${Math.max(NARROW ? 720 : 0, 130 * keys.length)}px`;
  holder.keys = keys;
  return plot("parallel", points.length ? [{type: "parcoords", line: {color: points.map((p) => families.indexOf(p.family)), cmin: -0.5, cmax: families.length - 0.5, colorscale: steps},
    unselected: {line: {color: css("line"), opacity: 0.3}}, labelfont: {color: css("text")}, tickfont: {color: css("text")}, rangefont: {color: css("ground"), size: 1}, dimensions}] : [], {margin: {l: 70, r: 70, t: 60, b: 30}});
}

function heat(workload) {
  const axis = byId("axis").value, withPlan = shownIn(workload).filter((point) => Object.keys(point.choices).length);
  const fronts = familiesOf(withPlan).flatMap((family) => front(workload, withPlan.filter((point) => point.family === family), axis));
  const ordered = distinct([...fronts, ...ranked(workload, withPlan)]).slice(0, MAX_COLUMNS).sort((a, b) => a.state_mib - b.state_mib);
  byId("heat").hidden = !ordered.length;
  byId("heat_note").textContent = !ordered.length ? "No point shown has a record of its plan." : withPlan.length > ordered.length ? `${ordered.length} of ${withPlan.length} points are drawn, those on fronts and the best; keep others by a filter or brush.` : "";
  const blocks = distinct(ordered.flatMap((point) => Object.keys(point.choices)));
  const many = ordered.length > 12, most = many ? 20 : 34;
  const names = ordered.map((point, at) => `${at + 1}. ${point.short.length > most ? point.short.slice(0, most - 1) + "…" : point.short}`);
  const keptShare = (point, block) => (block in point.kept ? point.kept[block] : block in point.choices ? 0 : null);
  const blockText = (point, block) => (block in point.choices ? `${point.choices[block]}<br>` + (block in point.kept ? `${number(point.kept[block], 3)} % of fp32 AdamW's state` : "its state is not recorded") : "");
  byId("heat").style.height = `${Math.max(300, 214 + 22 * blocks.length)}px`;
  byId("heat").style.minWidth = `${Math.max(NARROW ? 560 : 0, 220 + 26 * ordered.length)}px`;
  const scale = isDark() ? [[0, "#24282d"], [0.35, "#274a66"], [0.6, "#3d83b5"], [1, "#b5dcfa"]] : [[0, "#f3f0e6"], [0.35, "#b9d3e3"], [0.6, "#5c9bc4"], [1, "#123f66"]];
  const shares = blocks.length < 12 ? [0, 10, 100] : [0, 1, 5, 10, 25, 50, 100]; // a low bar has no room for more
  // Equal steps of colour for equal steps of the root, so that a hundredth and a tenth still differ
  return plot("heat", [{type: "heatmap", x: names, y: blocks, xgap: 2, ygap: 1, zmin: 0, zmax: 10, colorscale: scale,
    z: blocks.map((block) => ordered.map((point) => { const share = keptShare(point, block); return share === null ? null : Math.sqrt(Math.min(share, 100)); })),
    text: blocks.map((block) => ordered.map((point) => point.choices[block] || "")), texttemplate: ordered.length <= (NARROW ? 2 : 9) ? "%{text}" : "", textfont: {size: 10},
    customdata: blocks.map((block) => ordered.map((point) => `${point.short}<br>${blockText(point, block)}`)), hovertemplate: "%{y}<br><b>%{customdata}</b><extra></extra>",
    colorbar: {title: {text: "% of AdamW's<br>state kept"}, tickvals: shares.map(Math.sqrt), ticktext: shares.map(String), thickness: 14}}],
  {margin: {l: 20, r: 20, t: 36, b: 30}, yaxis: {autorange: "reversed", automargin: true, tickfont: {size: 11}, dtick: 1}, xaxis: {tickangle: many ? 60 : 35, automargin: true, tickfont: {size: 11}, dtick: 1}});
}

function curves(workload) {
  const all = ranked(workload, shownIn(workload)).filter((point) => Object.keys(point.curves).length), points = all.slice(0, MAX_CURVES);
  byId("curves_note").textContent = all.length > points.length ? `${points.length} of ${all.length} are drawn, the best first; keep others by a filter or brush.` : "";
  const traces = points.flatMap((point) => Object.entries(point.curves).map(([key, pairs]) => ({x: pairs.map((p) => p[0]), y: pairs.map((p) => p[1]), customdata: pairs.map(() => point.label), name: key,
    mode: key === "train/loss" ? "lines" : "lines+markers", line: {color: colour(point.family), width: point.label === state.open ? 3 : 1, dash: key === "train/loss" ? "solid" : "dot"}, marker: {color: colour(point.family), size: 6},
    hovertemplate: `${point.short}<br>step %{x}: %{y:.4g}<extra>${key}</extra>`, showlegend: false})));
  const drawn = distinct(traces.map((trace) => trace.name)).map((key) => (key === "train/loss" ? "train/loss (lines)" : `${key} (dots)`));
  return plot("curves", traces, {margin: {l: EDGE, r: 12, t: 12, b: 44}, hovermode: "closest", xaxis: {title: {text: "optimizer step"}}, yaxis: {title: {text: drawn.join(", ")}}, uirevision: workload.name});
}

// ---- tables

function ranked(workload, points) {
  const sign = workload.higher ? -1 : 1, nullLast = (value) => Number(value === null);
  const column = shownColumns(workload).find((own) => own.key === state.sort);
  if (!column) return [...points].sort((a, b) => Number(a.dominated) - Number(b.dominated) || nullLast(a.quality) - nullLast(b.quality) || sign * (a.quality - b.quality));
  const direction = state.descending ? -1 : 1;
  return [...points].sort((a, b) => {
    const [x, y] = [column.of(a), column.of(b)];
    return nullLast(x) - nullLast(y) || direction * (asNumber(x) !== null && asNumber(y) !== null ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true}));
  });
}

function pointTable(workload) {
  const columns = shownColumns(workload);
  const heads = columns.map((column) => {
    const own = state.sort === column.key, cell = element("th", {className: column.numeric ? "number" : ""});
    cell.setAttribute("aria-sort", own ? (state.descending ? "descending" : "ascending") : "none");
    const button = element("button", {textContent: column.head + (own ? (state.descending ? " ▼" : " ▲") : ""), title: `sort by ${column.key}`});
    button.addEventListener("click", () => { // up, down, and as it was
      [state.sort, state.descending] = !own ? [column.key, false] : state.descending ? [null, false] : [column.key, true];
      pointTable(workload);
      saveView();
      byId("points").querySelectorAll("th button")[columns.indexOf(column)].focus();
    });
    cell.append(button);
    return cell;
  });
  const body = element("tbody");
  ranked(workload, shownIn(workload)).forEach((point) => {
    const row = element("tr", {className: `${point.dominated ? "dominated" : ""} ${point.label === state.open ? "open" : ""}`, tabIndex: 0}, ...columns.map((column) => {
      const value = column.of(point), text = column.digits ? (value === null && column.key === "interval" ? "" : number(value, column.digits)) : value ?? "";
      return element("td", {textContent: text, title: value ?? "", className: column.numeric ? "number" : ""});
    }));
    row.dataset.label = point.label;
    row.addEventListener("click", () => open(point.label));
    row.addEventListener("keydown", (event) => {
      const rows = [...body.querySelectorAll("tr[data-label]")], step = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (event.key === "Enter") open(point.label);
      else if (step) rows[rows.indexOf(row) + step]?.focus();
      else return;
      event.preventDefault();
    });
    body.append(row);
    if (point.label === state.open) body.append(element("tr", {className: "more"}, element("td", {colSpan: columns.length}, about(workload, point))));
  });
  byId("points").replaceChildren(element("thead", {}, element("tr", {}, ...heads)), body);
}

function about(workload, point) {
  const withCopyButton = (text) => {
    const button = element("button", {textContent: "copy", title: "copy"});
    button.addEventListener("click", () => navigator.clipboard.writeText(text).then(() => { button.textContent = "copied"; }, () => { button.textContent = "not allowed here"; }));
    return [element("code", {textContent: text}), button];
  };
  const openLink = (folder) => (addressOf(folder) ? [element("a", {href: addressOf(folder).href, textContent: "open", className: "open"})] : []);
  const rows = [["settings", point.label], ["chosen by", point.basis], [workload.quality, `${number(point.quality, 6)}${point.spread === null ? "" : `, standard deviation ${number(point.spread, 3)} of ${point.seeds} seeds`}`]];
  return element("dl", {}, ...rows.filter(([, text]) => text).flatMap(([name, text]) => [element("dt", {textContent: name}), element("dd", {textContent: text})]),
    element("dt", {textContent: "command"}), element("dd", {}, ...withCopyButton(point.command)), ...point.folders.flatMap((folder, at) => [element("dt", {textContent: at ? "" : "folder"}), element("dd", {}, ...withCopyButton(placeOf(folder)), ...openLink(folder))]));
}

// Folders are kept relative to the page, which may be sent elsewhere. Opened as a file it knows where they are and can
// open them; on a server it cannot.
function addressOf(folder) {
  return location.protocol === "file:" ? new URL(`${folder.split("/").map(encodeURIComponent).join("/")}/`, location) : null;
}

function placeOf(folder) {
  const address = addressOf(folder);
  return address ? decodeURIComponent(address.pathname).replace(/\/$/, "") : folder;
}

// Opens a point's row, or closes it; a click in a figure brings the row into view
function open(label, {scroll = false} = {}) {
  state.open = state.open === label && !scroll ? null : label;
  const workload = view(currentWorkload());
  pointTable(workload);
  saveView();
  ["scatter", "slice", "curves"].forEach(redraw);
  const row = [...byId("points").querySelectorAll("tr[data-label]")].find((own) => own.dataset.label === label);
  if (scroll) row?.scrollIntoView({block: "nearest"});
  row?.focus({preventScroll: true});
}

function levels(workload) {
  const families = familiesOf(workload.points).filter((family) => workload.levels.some((level) => level.best[family]));
  const best = (level) => Object.entries(level.best).sort((a, b) => (workload.higher ? -1 : 1) * (a[1].quality - b[1].quality))[0][0];
  const bestText = (own) => (own ? `${number(own.quality)}${own.interval === null ? "" : ` ± ${number(own.interval, 2)}`}, n ${own.seeds}: ${own.name}${own.of > 1 ? ` (best of ${own.of})` : ""}` : "none fits");
  const holder = table("levels", [`at most (${qualityTitle(workload)})`, ...families], workload.levels.map((level) => [level.name, ...families.map((family) => bestText(level.best[family]))]));
  workload.levels.forEach((level, at) => { holder.rows[at + 1].cells[1 + families.indexOf(best(level))].style.fontWeight = "600"; });
}

function saveCsv(workload) {
  const columns = [...columnsOf(workload), ...["label", "basis", "command"].map((key) => ({key, of: (p) => p[key]})), {key: "folders", of: (p) => p.folders.map(placeOf).join(" ")}];
  const quoted = (value) => (/[",\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  const lines = [columns.map((column) => column.key), ...ranked(workload, shownIn(workload)).map((point) => columns.map((column) => column.of(point)))];
  const link = element("a", {download: "points.csv", href: URL.createObjectURL(new Blob([lines.map((line) => line.map(quoted).join(",") + "\n").join("")], {type: "text/csv"}))});
  link.click();
  return link;
}

// ---- the page

// A figure is drawn when it is near the window, so that hundreds of runs do not make one wait
const FIGURES = {scatter, slice, importance, heat, parallel, curves, history}, stale = new Set(), near = new Set();
const watcher = new IntersectionObserver((entries) => entries.forEach(({target, isIntersecting}) => {
  near[isIntersecting ? "add" : "delete"](target.id);
  if (isIntersecting && stale.has(target.id)) redraw(target.id);
}), {rootMargin: "400px"});

function redraw(id) {
  if (!near.has(id)) return stale.add(id);
  stale.delete(id);
  return FIGURES[id](view(currentWorkload()));
}

function draw() {
  const workload = view(currentWorkload()), shown = shownIn(workload), axis = byId("axis").value;
  const numDiverged = shown.filter((point) => point.quality === null).length;
  byId("summary").textContent = `${shown.length} of ${workload.points.length} points${numDiverged ? `, ${numDiverged} of them diverged and cannot be drawn` : ""}`;
  byId("all").hidden = shown.length === workload.points.length;
  const knee = kneeOf(workload, axis);
  const unit = axis === "state_share" ? " % of fp32 AdamW's optimizer state" : axis === "state_mib" ? " MiB of optimizer state" : " MiB peak memory";
  byId("knee").textContent = knee ? `Knee (the star): ${knee.short}, ${workload.quality} ${number(knee.quality)} with ${number(knee[axis], 3)}${unit}. More memory buys little there, less costs much.`
    : "";
  pointTable(workload);
  saveView();
  Object.keys(FIGURES).forEach(redraw);
}

// The view is in the address, so that a bookmark or a link shows it again; brushes are not. The address of a frame is not
// the reader's, and changing that of a srcdoc loads another page into it.
function saveView() {
  if (window !== window.top) return;
  const off = [...document.querySelectorAll("#families input:not(:checked)")].map((box) => box.value);
  const settings = {kind: byId("kind").value === "0" ? "" : currentWorkload().name, by: byId("by").value === "family" ? "" : "study", axis: byId("axis").selectedIndex ? byId("axis").value : "", against: byId("slice_by").selectedIndex > 0 ? byId("slice_by").value : "",
    query: byId("query").value, off: off.length ? JSON.stringify(off) : "", sort: state.sort ? (state.descending ? "-" : "") + state.sort : "", open: state.open || ""};
  const hash = new URLSearchParams(Object.entries(settings).filter(([, value]) => value)).toString() || (location.hash && "view");
  if (hash && location.hash.slice(1) !== hash) location.replace(`#${hash}`); // history.replaceState is refused to files
}

// A list in a link; empty if the link was mistyped
function listOf(text) {
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) ? list : [];
  } catch { return []; }
}

function restoreView() {
  const saved = new URLSearchParams(location.hash.slice(1)), off = listOf(saved.get("off")), sort = saved.get("sort") || "";
  const at = data.workloads.findIndex((workload) => workload.name === saved.get("kind"));
  const pick = (id, value) => { if ([...byId(id).options].some((option) => option.value === value)) byId(id).value = value; };
  if (at >= 0) byId("kind").value = at;
  pick("by", saved.get("by"));
  pick("axis", saved.get("axis"));
  byId("query").value = saved.get("query") || "";
  Object.assign(state, {sort: sort.replace("-", "") || null, descending: sort.startsWith("-"), open: saved.get("open")});
  choose(() => {
    pick("slice_by", saved.get("against"));
    document.querySelectorAll("#families input").forEach((box) => { box.checked = !off.includes(box.value); });
  });
}

function choose(then = () => {}) {
  const workload = view(currentWorkload()), group = comparedBy(), weights = workload.importances;
  state.brush = null;
  state.ranges = {};
  byId("compare").hidden = !currentWorkload().study;
  byId("families_note").hidden = group === "study";
  byId("studies_note").hidden = group !== "study";
  byId("about").textContent = workload.about;
  byId("verdict").textContent = workload.verdict;
  levels(workload);
  table("volumes", ["memory axis", group, "points", "share, %"], workload.volumes.map((row) => [row.axis === "state_bytes" ? "optimizer state" : "peak memory", row.family, row.points, row.share === null ? "n/a" : row.share.toFixed(1)]), [2, 3]);
  byId("area").hidden = workload.volumes.every((row) => row.share === null); // one value of quality or memory spans none
  byId("measures").hidden = workload.points.length < 2; // one line compares nothing
  const names = [...workload.settings].sort((a, b) => (weights[b] || 0) - (weights[a] || 0));
  byId("slice_by").replaceChildren(...names.map((name) => new Option(name)));
  byId("settings").hidden = byId("slice_note").hidden = !Object.keys(weights).length;
  byId("families").replaceChildren(...familiesOf(workload.points).map((family) => {
    const label = element("label", {}, element("input", {type: "checkbox", value: family, checked: true}), ` ${family}`);
    label.style.color = colour(family);
    return label;
  }));
  then();
  draw();
}

function showAll() {
  byId("query").value = "";
  state.brush = null;
  state.ranges = {};
  document.querySelectorAll("#families input").forEach((box) => { box.checked = true; });
  ["scatter", "slice"].forEach((id) => { if (byId(id).layout) byId(id).layout.selections = []; });
  draw();
}

function showTheme(theme, {remember = true} = {}) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `colours: ${theme}`;
  if (remember) try { localStorage.setItem("baoc-theme", theme); } catch { /* a browser that keeps nothing of files */ }
  if (data.workloads.length) {
    document.querySelectorAll("#families label").forEach((label) => { label.style.color = colour(label.querySelector("input").value); });
    Object.keys(FIGURES).forEach(redraw);
  }
}

function listen() {
  const debounced = (callback) => { let timer; return () => { clearTimeout(timer); timer = setTimeout(callback, 150); }; };
  ["kind", "by"].forEach((id) => byId(id).addEventListener("change", () => choose()));
  ["axis", "families"].forEach((id) => byId(id).addEventListener("change", draw));
  byId("slice_by").addEventListener("change", () => { saveView(); redraw("slice"); });
  byId("query").addEventListener("input", debounced(draw));
  byId("all").addEventListener("click", showAll);
  byId("csv").addEventListener("click", () => saveCsv(view(currentWorkload())));
  byId("theme").addEventListener("click", () => showTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showTheme(document.documentElement.dataset.theme, {remember: false}));
  addEventListener("resize", debounced(() => Object.keys(FIGURES).forEach(redraw)));
  addEventListener("beforeprint", () => { Object.keys(FIGURES).forEach((id) => { near.add(id); redraw(id); }); });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") showAll();
    else if (event.key === "/" && document.activeElement.tagName !== "INPUT") byId("query").focus();
    else return;
    event.preventDefault();
  });
  Object.keys(FIGURES).forEach((id) => plot(id, [], {}).then((holder) => {
    watcher.observe(holder);
    if (id === "parallel") holder.on("plotly_restyle", () => {
      const ranges = (kept) => (Array.isArray(kept[0]) ? kept : [kept]);
      state.ranges = Object.fromEntries((holder.data[0]?.dimensions || []).flatMap((own, at) => (own.constraintrange ? [[holder.keys[at], {axis: axisOf(view(currentWorkload()), holder.keys[at]), ranges: ranges(own.constraintrange)}]] : [])));
      draw();
    });
    if (["scatter", "slice", "curves"].includes(id)) holder.on("plotly_click", ({points}) => { if (points[0].customdata) open(points[0].customdata, {scroll: true}); });
    if (["scatter", "slice"].includes(id)) {
      holder.on("plotly_selected", (event) => { if (event) { state.brush = new Set(event.points.map((point) => point.customdata).filter(Boolean)); draw(); } });
      holder.on("plotly_deselect", () => { state.brush = null; draw(); });
    }
  }));
}

let theme = "auto";
try { theme = localStorage.getItem("baoc-theme") || theme; } catch { /* the system's */ }
data.workloads.forEach((workload, at) => byId("kind").add(new Option(workload.name, at)));
showTheme(THEMES.includes(theme) ? theme : "auto", {remember: false});
if (data.failed.length) {
  byId("failed").append(element("h2", {textContent: "Runs without a good end"}), element("div", {className: "wide"}, element("table", {id: "failures"})));
  const rows = table("failures", ["run", "settings", "exit code", "message"], data.failed.map((job) => [job.run, job.label === job.run ? "not known" : job.label, job.code === null ? "" : job.code, job.message]), [2]).rows;
  data.failed.forEach((job, at) => { if (addressOf(job.folder)) rows[at + 1].cells[0].replaceChildren(element("a", {href: addressOf(job.folder).href, textContent: job.run})); });
  const link = element("button", {textContent: `${data.failed.length} run${data.failed.length > 1 ? "s" : ""} without a good end`});
  link.addEventListener("click", () => byId("failed").scrollIntoView());
  byId("nothing").before(link);
}
if (data.race) {
  byId("race").hidden = false;
  byId("race_lines").replaceChildren(...data.race.lines.map((text) => element("p", {textContent: text})));
  table("race_table", data.race.head, data.race.rows, data.race.head.map((_, at) => at).slice(1, -1));
}
if (data.workloads.length) {
  restoreView();
  listen();
} else {
  byId("nothing").textContent = "No run has finished yet, so there is nothing to compare.";
  document.querySelector("main").hidden = true;
}
document.body.dataset.ready = "yes";
