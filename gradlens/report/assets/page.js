"use strict";
/* What a report does besides zooming: one step in all panels, colours, switches, the address. */
const gradlens = (() => {
  const find = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { log: false, smooth: true, step: null, full: null, off: new Set() };
  let models = null;
  let panels = [];

  /** Change a model on this page alone: a server isn't told, as it has the values only. */
  const set = (model, values) => model.setv(values, { sync: false });

  // Numbers ---------------------------------------------------------------------------------

  function numberLabel(value, digits = 3) {
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size < 1e-300) return "0";
    let text;
    if (size >= 0.999999999e-3 && size < 0.999999999e5) {
      const whole = String(Math.trunc(size)).length;
      text = String(Number(value.toPrecision(Math.max(digits, whole))));
    } else {
      const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
      text = `${Number(mantissa)}e${Number(exponent)}`;
    }
    return text.replaceAll("-", "−");
  }

  function valueLabel(tick, linear) {
    if (!linear) return numberLabel(tick);
    return numberLabel(Math.sign(tick) * linear * (10 ** Math.abs(tick) - 1));
  }

  const warp = (step) => (state.log ? Math.log10(1 + Math.max(step, 0)) : step);
  const unwarp = (place) => (state.log ? 10 ** place - 1 : place);

  function stepLabel(tick) {
    const step = unwarp(tick);
    const whole = Math.round(step);
    if (step < -0.5 || Math.abs(step - whole) > 1e-6 * Math.max(1, step)) return "";
    if (whole >= 1e6 && whole % 1e4 === 0) return `${whole / 1e6}M`;
    if (whole >= 1e4 && whole % 100 === 0) return `${whole / 1e3}k`;
    return whole.toLocaleString("en");
  }

  /** The place of the step nearest to ``step`` in an ascending column; −1 in an empty one. */
  function nearest(steps, step) {
    let low = 0;
    let high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    if (low === steps.length) return low - 1;
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  }

  // Panels ----------------------------------------------------------------------------------

  const tag = (renderer) => plain(renderer.tags[0] ?? {});
  /** Python's dicts arrive as maps or as objects. */
  const plain = (found) => (found instanceof Map ? Object.fromEntries(found) : found);
  const named = (plot, name) => plot.renderers.filter((each) => each.name === name);

  function panelOf(plot) {
    const card = document.getElementById(plot.name.split("-")[0]);
    const values = named(plot, "values");
    const gaps = named(plot, "gaps");
    const curves = values.map((line, place) => ({
      line,
      gaps: gaps[place].data_source,
      output: one(`output[data-curve="${tag(line).curve}"]`, card),
      unit: tag(line).unit,
      name: tag(line).name,
    }));
    const map = named(plot, "map").find((each) => tag(each).names);
    return { plot, card, curves, map, height: plot.height };
  }

  /** The value of a curve at a step, or its latest one, and why it is missing. */
  function read(curve, step) {
    const { step: steps, value: values } = curve.line.data_source.data;
    const { step: missing, why: reasons } = curve.gaps.data;
    const place = step === null ? steps.length - 1 : nearest(steps, step);
    const gap = step === null ? missing.length - 1 : nearest(missing, step);
    if (place < 0) return { value: NaN, why: "" };
    const target = step ?? steps[place];
    const isMissing = gap >= 0 && Math.abs(missing[gap] - target) <= Math.abs(steps[place] - target);
    if (!isMissing) return { value: values[place], why: "", at: steps[place] };
    const why = reasons[gap];
    return { value: why === "infinite" ? Infinity : NaN, why, at: missing[gap] };
  }

  function showValues() {
    for (const panel of panels) {
      const reasons = [];
      if (panel.curves.length > 1) one("header output", panel.card).textContent = "";
      for (const curve of panel.curves) {
        if (!curve.output) continue;
        const { value, why, at } = read(curve, state.step);
        const finite = Number.isFinite(value);
        curve.output.textContent = numberLabel(value) + (finite && curve.unit ? ` ${curve.unit}` : "");
        curve.output.classList.toggle("alarm", why === "not a number");
        if (why && why !== "infinite") reasons.push(`${curve.name}, step ${at}: ${why}`);
      }
      if (state.step === null) showLatest(panel.card);
      showReason(panel.card, state.step === null ? [] : reasons);
    }
    one("#step").textContent = state.step === null ? "" : `step ${stepText(state.step)}`;
  }

  /** Show what a figure has beside the title, which needn't be the last value of a curve. */
  function showLatest(card) {
    const output = one("header output", card);
    const [text, alarm] = plain(models.status.data.latest[0])[card.id] ?? [];
    if (!output || text === undefined) return;
    output.textContent = text;
    output.classList.toggle("alarm", alarm);
  }

  const stepText = (step) => Math.round(Math.max(step, 0)).toLocaleString("en");

  function showReason(card, reasons) {
    let note = one(".reason", card);
    if (!note && !reasons.length) return;
    if (!note) {
      note = document.createElement("p");
      note.className = "reason";
      one("header", card).after(note);
    }
    note.hidden = !reasons.length;
    note.textContent = reasons.join("; ");
  }

  /** Call something once before the next picture, however often this is asked for. */
  const waiting = new Set();
  function later(task) {
    if (!waiting.size) {
      requestAnimationFrame(() => {
        const tasks = [...waiting];
        waiting.clear();
        for (const each of tasks) each();
      });
    }
    waiting.add(task);
  }

  function hover(x, y, plot) {
    state.step = unwarp(x);
    showCell(plot, Math.floor(y));
    later(showValues);
  }

  function leave() {
    state.step = null;
    for (const panel of panels.filter((each) => each.map)) one("output", panel.card).textContent = "";
    later(showValues);
  }

  function showCell(plot, row) {
    const panel = panels.find((each) => each.plot === plot);
    if (!panel?.map) return;
    const { names } = tag(panel.map);
    const { data } = below(panel).renderers[0].data_source;
    const values = data[`row ${row}`];
    const place = nearest(data.step, state.step);
    const text = values && place >= 0 ? `${names[row]} ${numberLabel(values[place])}` : "";
    one("output", panel.card).textContent = text;
  }

  const below = (panel) => models.plots.find((plot) => plot.name === panel.plot.name.replace("-0", "-1"));

  /** Show the line of a row of a map, or hide it if it is shown. */
  function select(y, plot) {
    const panel = panels.find((each) => each.plot === plot);
    if (panel?.map) showRow(panel, Math.floor(y), true);
  }

  function showRow(panel, row, toggles) {
    const { names } = tag(panel.map);
    if (!(row in names)) return;
    const plot = below(panel);
    const [line] = named(plot, "row");
    const field = `row ${row}`;
    const hides = toggles && plot.visible && line.glyph.y.field === field;
    set(line.glyph, { y: { field } });
    set(plot, { visible: !hides });
    const words = one(".words span", panel.card);
    words.dataset.plain ??= words.textContent;
    words.textContent = hides ? words.dataset.plain : `${words.dataset.plain} · line: ${names[row]}`;
  }

  // The range of steps ----------------------------------------------------------------------

  const isFull = () => {
    const { start, end } = models.x_range;
    const [low, high] = state.full.map(warp);
    const width = Math.abs(high - low) * 1e-3;
    return Math.abs(start - low) < width && Math.abs(end - high) < width;
  };

  function view(low, high) {
    set(models.x_range, { start: warp(low), end: warp(high) });
  }

  const reset = () => view(...state.full);

  /** Fit the value axes to what is in view; a figure has the same margins. */
  function fit() {
    const [start, end] = [models.x_range.start, models.x_range.end].map(unwarp);
    for (const { plot, curves } of panels) {
      if (!tag(plot).fits) continue;
      let [low, high] = [Infinity, -Infinity];
      for (const { line } of curves.filter((each) => each.line.visible)) {
        const { data } = line.data_source;
        const values = data[line.glyph.y.field];
        for (let n = 0; n < values.length; n++) {
          if (data.step[n] < start || data.step[n] > end || Number.isNaN(values[n])) continue;
          low = Math.min(low, values[n]);
          high = Math.max(high, values[n]);
        }
      }
      if (low <= high) set(plot.y_range, padded(low, high, isLog(plot)));
    }
  }

  function padded(low, high, log) {
    if (log) {
      const [first, last] = [Math.log10(low), Math.log10(high)];
      const pad = last - first > 0.02 ? 0.06 * (last - first) : 0.2;
      return { start: 10 ** Math.max(first - pad, -307), end: 10 ** Math.min(last + pad, 307) };
    }
    const pad = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
    return { start: low === 0 && high > 0 ? 0 : low - pad, end: high + pad };
  }

  let timer = 0;
  function ranged() {
    later(fit);
    one("#reset").hidden = isFull();
    clearTimeout(timer);
    timer = setTimeout(() => {
      const ends = [models.x_range.start, models.x_range.end].map((place) => Math.round(unwarp(place)));
      const hash = isFull() ? "#all" : `#steps=${ends.join("..")}`;
      if (location.hash !== hash && (location.hash || hash !== "#all")) location.replace(hash);
    }, 150);
  }

  function fromAddress() {
    const found = /^#steps=(-?\d+)\.\.(-?\d+)$/.exec(location.hash);
    if (found && Number(found[1]) < Number(found[2])) view(Number(found[1]), Number(found[2]));
    else if (location.hash === "#all") reset();
  }

  function setLog(on) {
    const ends = [models.x_range.start, models.x_range.end].map(unwarp);
    const full = isFull();
    state.log = on;
    const x = on ? { field: "step", transform: models.places } : { field: "step" };
    const prefix = on ? "log " : "";
    for (const plot of models.plots.filter((each) => tag(each).steps)) {
      for (const renderer of plot.renderers) {
        if (renderer.name === "map") {
          const fields = { image: `${prefix}image`, x: `${prefix}x`, dw: `${prefix}dw` };
          const specs = Object.entries(fields).map(([key, field]) => [key, { field }]);
          set(renderer.glyph, Object.fromEntries(specs));
        } else set(renderer.glyph, { x });
      }
      for (const axis of plot.below) {
        set(axis, { ticker: on ? models.log_ticks : models.ticks });
      }
    }
    if (full) reset();
    else view(...ends);
  }

  /** Round numbers on a logarithmic axis, about four, also where it spans less than a decade. */
  function logTicks(low, high) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const powers = Array.from({ length: last - first + 1 }, (_, n) => first + n);
    const inside = (ticks) => ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    const decades = Math.log10(high / low);
    const stride = Math.max(1, Math.ceil(decades / 4));
    const options = [
      [1.9, powers.filter((power) => power % stride === 0).map((power) => 10 ** power)],
      [1.2, powers.flatMap((power) => [1, 3].map((digit) => digit * 10 ** power))],
      [0.5, powers.flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power))],
    ];
    for (const [least, ticks] of options) {
      if (decades >= least && inside(ticks).length > 1) return inside(ticks);
    }
    const raw = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((digit) => digit * power >= raw);
    const start = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - start + 1 }, (_, n) => (start + n) * step);
  }

  const isLog = (plot) => plot.left[0].ticker.tags[0] === "log";

  function setLogTicks(plot) {
    const { start, end } = plot.y_range;
    if (isLog(plot) && start > 0 && end > start) {
      set(plot.left[0].ticker, { ticks: logTicks(start, end) });
    }
  }

  // Colours and switches --------------------------------------------------------------------

  function paint() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    for (const plot of models.plots) {
      for (const axis of [...plot.left, ...plot.below]) {
        set(axis, {
          major_label_text_color: color("muted"),
          axis_label_text_color: color("muted"),
          ...(plot.below.includes(axis)
            ? { axis_line_color: color("faint"), major_tick_line_color: color("faint") }
            : {}),
        });
      }
      for (const part of plot.center) {
        if (part.type === "Grid") set(part, { grid_line_color: color("grid") });
        else set(part, { line_color: color("faint") });
      }
      for (const renderer of plot.renderers) {
        const { part, light, dark: pale } = tag(renderer);
        if (part) set(renderer.glyph, { [part]: { value: dark.matches ? pale : light } });
      }
    }
    set(models.span, { line_color: color("muted") });
    for (const [name, found] of Object.entries(plain(models.palettes))) {
      set(plain(models.mappers)[name], { palette: plain(found)[dark.matches ? "dark" : "light"] });
    }
  }

  function showCurves() {
    for (const { plot, card, curves } of panels) {
      for (const renderer of plot.renderers) {
        const { curve } = tag(renderer);
        if (curve === undefined) continue;
        const name = curves.find((each) => tag(each.line).curve === curve)?.name ?? curve;
        const shown = !state.off.has(name) && !state.off.has(`${card.id} ${curve}`);
        set(renderer, { visible: shown && (renderer.name !== "trend" || state.smooth) });
        if (renderer.name === "values" && tag(renderer).smooth) {
          set(renderer.glyph, {
            line_alpha: { value: state.smooth ? 0.38 : 1 },
            line_width: { value: state.smooth ? 0.8 : 1.4 },
          });
        }
      }
    }
    later(fit);
  }

  function flip(button, key) {
    const off = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!off));
    if (off) state.off.add(key);
    else state.off.delete(key);
    showCurves();
  }

  function filter(text) {
    const wanted = text.trim().toLowerCase();
    for (const card of find(".card")) {
      const panel = panels.find((each) => each.card === card && each.map);
      const rows = (panel ? tag(panel.map).names : []).map((name) => name.toLowerCase());
      const row = wanted ? rows.findIndex((name) => name.includes(wanted)) : -1;
      const names = find("[data-name]", card).map((each) => each.dataset.name);
      const words = [one("h3", card).textContent, ...find(".words", card).map((each) => each.textContent), ...names];
      card.hidden = row < 0 && !words.join(" ").toLowerCase().includes(wanted);
      if (row >= 0) showRow(panel, row, false);
    }
    for (const section of find("section")) {
      section.hidden = find(".card", section).every((card) => card.hidden);
    }
  }

  function enlarge(card) {
    const large = card.classList.toggle("large");
    for (const panel of panels.filter((each) => each.card === card && !each.map)) {
      const height = large ? Math.max(320, Math.round(innerHeight * 0.55)) : panel.height;
      set(panel.plot, { height });
    }
    if (large) card.scrollIntoView({ block: "nearest" });
  }

  function bind() {
    one("#log").addEventListener("change", (event) => setLog(event.target.checked));
    one("#smooth").addEventListener("change", (event) => {
      state.smooth = event.target.checked;
      showCurves();
    });
    one("#reset").addEventListener("click", reset);
    one("#filter").addEventListener("input", (event) => filter(event.target.value));
    for (const button of find("button.run")) {
      button.addEventListener("click", () => flip(button, button.dataset.run));
    }
    for (const button of find(".key button")) {
      const key = `${button.closest(".card").id} ${button.dataset.curve}`;
      button.addEventListener("click", () => flip(button, key));
    }
    for (const button of find("button.title")) {
      button.addEventListener("click", () => enlarge(button.closest(".card")));
    }
    dark.addEventListener("change", paint);
    addEventListener("hashchange", fromAddress);
  }

  // News of a live page ---------------------------------------------------------------------

  function news() {
    const { head, bars, words, pictures, low, high, reload } = models.status.data;
    if (reload[0]) {
      location.reload();
      return;
    }
    const open = find("#head details").map((each) => each.open);
    one("#head").innerHTML = head[0]; // escaped where it was made
    find("#head details").forEach((each, place) => (each.open = open[place] ?? false));
    for (const [id, ends] of Object.entries(plain(bars[0]))) {
      find(".bar b", document.getElementById(id)).forEach((label, n) => (label.textContent = ends[n]));
    }
    for (const [id, text] of Object.entries(plain(words[0]))) {
      one(".words span", document.getElementById(id)).textContent = text;
    }
    for (const [id, picture] of Object.entries(plain(pictures[0]))) {
      one("img", document.getElementById(id)).src = picture;
    }
    const full = isFull();
    state.full = [low[0], high[0]];
    if (full) reset();
    later(fit);
    later(showValues);
  }

  function start(status) {
    models = { status, ...plain(status.tags[0]) };
    state.full = [models.status.data.low[0], models.status.data.high[0]];
    panels = models.plots.filter((plot) => plot.name.endsWith("-0")).map(panelOf);
    if (matchMedia("(pointer: coarse)").matches) {
      // A finger scrolls the page. Its taps show the values of a step.
      for (const plot of models.plots) {
        set(plot.toolbar, { active_drag: null });
      }
    }
    for (const plot of models.plots) {
      setLogTicks(plot);
      for (const end of ["start", "end"]) {
        plot.y_range.properties[end].change.connect(() => setLogTicks(plot));
      }
    }
    bind();
    if (dark.matches) paint();
    models.x_range.properties.start.change.connect(ranged);
    models.x_range.properties.end.change.connect(ranged);
    models.status.properties.data.change.connect(news);
    fromAddress();
    showValues();
    watch();
  }

  const drawn = new Set();
  /** Pixels across a sheet of A4 or Letter between its margins. */
  const PRINTED = 700;

  /** Draw the figures of a card, unless they are. */
  function draw(frame) {
    if (drawn.has(frame)) return;
    drawn.add(frame);
    const children = models.plots.filter((plot) => plot.name.startsWith(`${frame.name}-`));
    set(frame, { children });
  }

  /** Draw the other figures one after the other, so that a print is whole whenever it is asked for. */
  function drawNext() {
    const next = models.frames.find((frame) => !drawn.has(frame));
    if (!next) return;
    draw(next);
    setTimeout(drawNext, 30);
  }

  /** Draw first what is on the screen or close to it, because drawing takes most of the time. */
  function watch() {
    const frames = new Map(models.frames.map((frame) => [one(`#${frame.name} .figure`), frame]));
    const observer = new IntersectionObserver(
      (entries) => {
        const seen = entries.filter((entry) => entry.isIntersecting);
        for (const { target } of seen) {
          draw(frames.get(target));
          observer.unobserve(target);
        }
        if (seen.length) finish();
      },
      { rootMargin: "50%" },
    );
    for (const element of frames.keys()) observer.observe(element);
    addEventListener("beforeprint", () => {
      models.frames.forEach(draw);
      hold(true);
    });
    addEventListener("afterprint", () => hold(false));
  }

  /** Say how many milliseconds it has taken until all figures in view were drawn. */
  function finish() {
    const shown = [...drawn].flatMap((frame) => frame.children).filter((plot) => plot.visible);
    if (shown.every((plot) => Bokeh.index.find_one(plot)?.has_finished())) {
      document.documentElement.dataset.drawn ??= Math.round(performance.now());
      setTimeout(drawNext, 200);
    } else requestAnimationFrame(finish);
  }

  /** Keep widths and columns as they are on the screen: figures don't change their size in a print. */
  function hold(held) {
    const { style } = document.documentElement;
    style.width = held ? `${innerWidth}px` : "";
    style.zoom = held ? Math.min(1, PRINTED / innerWidth) : "";
    for (const cards of find(".cards")) {
      const columns = getComputedStyle(cards).getPropertyValue("--columns");
      if (held) cards.style.setProperty("--columns", columns);
      else cards.style.removeProperty("--columns");
    }
  }

  /** A figure of the panel with a title, for whoever wants to change it from outside. */
  function plot(title, number = 0) {
    const card = find(".card").find((each) => one("h3", each).textContent.trim() === title);
    return models.plots.find((each) => each.name === `${card?.id}-${number}`);
  }

  return { plot, start, hover, leave, reset, select, stepLabel, valueLabel, view, setLog, state };
})();
