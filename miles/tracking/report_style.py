"""The report's style sheet and its script: light and dark, no resource from outside."""

STYLE = """
:root { color-scheme: light dark;
  --page: light-dark(#f7f7f5, #15171a); --card: light-dark(#fff, #1d2024); --edge: light-dark(#e3e3de, #2e3238);
  --ink: light-dark(#1d2126, #e6e8ea); --soft: light-dark(#686f78, #969da6); --mark: light-dark(#fff4d6, #3a3118);
  --good: light-dark(#1a7f4b, #4cc38a); --bad: light-dark(#b3402e, #f08b78); }
:root[data-theme=light] { color-scheme: light } :root[data-theme=dark] { color-scheme: dark }
.c0 { --c: light-dark(#2a6fdb, #6ea8ff) } .c1 { --c: light-dark(#d9722b, #f2a065) }
.c2 { --c: light-dark(#16937a, #4fd0b4) } .c3 { --c: light-dark(#8a56c9, #bd97f0) }
.c4 { --c: light-dark(#c23a67, #f283a7) } .c5 { --c: light-dark(#8b8f96, #7d848d) }
.c6 { --c: light-dark(#7d8c1f, #c3d057) } .c7 { --c: light-dark(#1f8fb8, #66c9ec) }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
main { max-width: 1400px; margin: 0 auto; padding: 32px 24px 64px }
header { display: flex; justify-content: space-between; align-items: baseline; gap: 16px }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 40px 0 12px }
h2 small { color: var(--soft); font-size: 13px; font-weight: 400; margin-left: 12px }
button { font: inherit; font-size: 13px; color: var(--soft); background: none; border: 1px solid var(--edge);
  border-radius: 6px; padding: 3px 10px; cursor: pointer }
.objective { margin: 10px 0 0; max-width: 90ch }
.formula { margin: 8px 0 0; padding: 8px 14px; background: var(--card); border-left: 3px solid var(--edge);
  overflow-x: auto; font: 15px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 24px }
.tile { background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 18px; min-width: 150px }
.tile b { display: block; font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums }
.tile span, .tile small { color: var(--soft); font-size: 13px }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); gap: 14px }
figure { position: relative; margin: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 12px 8px }
figcaption { display: flex; justify-content: space-between; align-items: baseline; gap: 8px; padding: 0 4px 6px;
  font-weight: 600 }
figcaption b { margin-left: 8px; color: var(--soft); font-weight: 400; font-variant-numeric: tabular-nums }
figcaption small { color: var(--soft); font-weight: 400; text-align: right }
svg { display: block; width: 100%; height: auto }
.grid { stroke: var(--edge); stroke-width: 1 } .tick { fill: var(--soft); font-size: 11px }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round }
.faint { opacity: .28; stroke-width: 1 }
.dot { fill: var(--c) } .area { fill: var(--c); opacity: .85 } .cursor { stroke: var(--soft); stroke-dasharray: 3 3 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 4px; color: var(--soft); font-size: 13px }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; background: var(--c); margin-right: 6px }
.tip { position: absolute; top: 40px; pointer-events: none; background: var(--ink); color: var(--page); font-size: 12px;
  border-radius: 6px; padding: 4px 9px; white-space: nowrap; z-index: 1; font-variant-numeric: tabular-nums }
details { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; margin-top: 8px }
summary { cursor: pointer; padding: 9px 16px; font-weight: 600 }
summary small { color: var(--soft); font-weight: 400; margin-left: 8px }
.answers { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr));
  gap: 12px; padding: 4px 16px 16px }
.answer { border: 1px solid var(--edge); border-radius: 8px; padding: 10px 14px; min-width: 0 }
.answer pre { margin: 2px 0 8px; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 280px; overflow-y: auto;
  font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace }
.answer h3 { margin: 0; font-size: 12px; font-weight: 400; color: var(--soft) }
.answer footer { font-size: 13px; color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad) }
.sections { columns: 420px; column-gap: 14px }
.sections details { break-inside: avoid; margin: 0 0 10px }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-bottom: 8px }
td { padding: 3px 16px; vertical-align: top; overflow-wrap: anywhere; color: var(--soft) }
td:first-child { width: 48% } td + td { font-family: ui-monospace, "DejaVu Sans Mono", monospace }
.set td { background: var(--mark); color: var(--ink) }
"""

SCRIPT = """
const root = document.documentElement;
document.querySelector('button').onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
};
for (const figure of document.querySelectorAll('figure')) {
  const {x: [low, high, left, right, width], series} = JSON.parse(figure.dataset.hover);
  const svg = figure.querySelector('svg'), cursor = figure.querySelector('.cursor');
  const steps = [...new Set(series.flatMap(s => s.points.map(p => p[0])))];
  const lookup = series.map(s => new Map(s.points));
  let tip = null;
  const leave = () => { tip?.remove(); tip = null; cursor.setAttribute('visibility', 'hidden'); };
  svg.onpointerleave = leave;
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect(), scale = box.width / width;
    const wanted = low + ((event.clientX - box.left) / scale - left) / (right - left) * (high - low);
    const step = steps.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const at = high > low ? left + (step - low) / (high - low) * (right - left) : (left + right) / 2;
    cursor.setAttribute('x1', at); cursor.setAttribute('x2', at); cursor.setAttribute('visibility', 'visible');
    if (!tip) { tip = document.createElement('div'); tip.className = 'tip'; figure.append(tip); }
    tip.replaceChildren(`step ${step}`);
    series.forEach((s, i) => {
      if (!lookup[i].has(step)) return;
      const line = document.createElement('div'), key = document.createElement('i');
      key.className = `key c${s.colour}`;
      line.append(key, (series.length > 1 ? s.label + ' ' : '') + lookup[i].get(step));
      tip.append(line);
    });
    const place = at * scale + 12;
    tip.style.left = (place > box.width / 2 ? place - tip.offsetWidth - 12 : place + 12) + 'px';
  };
}
"""
