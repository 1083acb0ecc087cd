/* Widgets of the pages: each takes the place of an element with data-widget. Their data are scripts
   that set SITE_DATA, so that a page also works when it is opened as a file. */
(() => {
  const chinese = document.documentElement.lang.startsWith("zh");
  const say = (english, other) => (chinese ? other : english);
  const GIB = 2 ** 30;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function drawing(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    return made;
  }

  /* A labelled choice; `change` is called when it changes. */
  function choice(label, values, change) {
    const select = element("select");
    for (const value of values) select.append(element("option", { value }, String(value)));
    select.addEventListener("change", change);
    return { select, row: element("label", {}, `${label} `, select) };
  }

  const unique = (values) => [...new Set(values)];
  const result = (name, tag = "p") => element(tag, { "data-result": name });

  function start(place, build) {
    if (place.dataset.ready) return;
    place.dataset.ready = "yes";
    place.replaceChildren();
    build(place);
  }

  // ------------------------------------------------------------------------- will it fit?

  function fit(place) {
    const { cells } = SITE_DATA.fit.data;
    const model = choice(say("Model", "模型"), unique(cells.map((c) => c.model)), show);
    const gpus = choice(say("GPUs", "GPU 数量"), unique(cells.map((c) => c.gpus)), show);
    const memory = choice(say("GPU type", "GPU 型号"), unique(cells.map((c) => c.memory)), show);
    const answer = element("div", { role: "status" });
    const verdict = result("fit-way"), peak = result("fit-peak"), command = result("fit-command", "code");
    const needs = result("fit-host");
    const bar = element("div", { class: "bar", "aria-hidden": "true" }, element("i"));
    answer.append(verdict, needs, peak);
    place.append(element("form", {}, model.row, gpus.row, memory.row), answer, bar, element("pre", {}, command));
    model.select.value = "llama3-8b";
    gpus.select.value = "8";
    memory.select.value = "H100";
    show();

    function show() {
      const chosen = cells.find((c) => c.model === model.select.value && c.memory === memory.select.value
        && c.gpus === Number(gpus.select.value));
      const size = (chosen.peak / GIB).toFixed(1), gigabytes = (bytes) => (bytes / 1e9).toFixed(1);
      const host = Math.round(chosen.host / GIB).toLocaleString("en");
      verdict.textContent = chosen.fits ? chosen.way
        : say(`Nothing fits; the closest is ${chosen.way}. Try ${chosen.ideas.join(" or ")}.`,
          `都放不下；最接近的是 ${chosen.way}。可以试试 ${chosen.ideas.join(" 或 ")}。`);
      peak.textContent = say(
        `Predicted peak: ${size} GiB per GPU, of ${chosen.gib} GiB (${chosen.spare.toFixed(1)} GiB kept in reserve)`,
        `预测峰值：每个 GPU ${size} GiB，共 ${chosen.gib} GiB（预留 ${chosen.spare.toFixed(1)} GiB）`)
        + (chosen.fits ? say(`; sends ${gigabytes(chosen.sent)} GB per step`, `；每步发送 ${gigabytes(chosen.sent)} GB`) : "")
        + (chosen.copied ? say(` and copies ${gigabytes(chosen.copied)} GB over PCIe`, `，经 PCIe 复制 ${gigabytes(chosen.copied)} GB`) : "");
      needs.textContent = say(`Needs ${host} GiB of host memory per GPU`, `每个 GPU 需要 ${host} GiB 主机内存`);
      needs.hidden = !chosen.host;
      const words = (chosen.fits ? chosen.command : chosen.estimate).split(" ");
      command.replaceChildren(...words.flatMap((word) => [element("span", { class: "option" }, word), " "]));
      bar.className = chosen.fits ? (chosen.host ? "bar host" : "bar") : "bar over";
      bar.firstChild.style.width = `${Math.min(100, 100 * chosen.peak / GIB / chosen.gib)}%`;
    }
  }

  // ----------------------------------------------------------------- a pipeline's schedule

  const WORK = { F: ["forward", "前向"], B: ["backward", "反向"], I: ["backward (inputs)", "反向（输入）"], W: ["backward (weights)", "反向（权重）"] };

  function schedules(place) {
    const all = SITE_DATA.schedules.data;
    const schedule = choice(say("Schedule", "调度"), unique(all.map((s) => s.schedule)), show);
    const ranks = choice(say("Ranks", "进程数"), unique(all.map((s) => s.ranks)), show);
    const parts = choice(say("Micro-batches", "micro-batch 数"), unique(all.map((s) => s.microbatches)), show);
    const bubble = element("p", { role: "status", "data-result": "schedule-bubble" });
    const picture = element("div");
    place.append(element("form", {}, schedule.row, ranks.row, parts.row), bubble, picture);
    schedule.select.value = "1f1b";
    ranks.select.value = "4";
    parts.select.value = "8";
    window.addEventListener("resize", show);
    show();

    function show() {
      const found = all.find((s) => s.schedule === schedule.select.value && s.ranks === Number(ranks.select.value)
        && s.microbatches === Number(parts.select.value));
      picture.replaceChildren();
      if (!found) {
        bubble.textContent = say("PyTorch does not support this combination.", "PyTorch 不支持这种组合。");
        return;
      }
      const percent = (share) => `${(100 * share).toFixed(1)}%`;
      bubble.textContent = say(`Bubble: ${percent(found.bubble)} of the time (formula: ${percent(found.formula)}); the step takes ${found.length} units.`,
        `气泡：占时间的 ${percent(found.bubble)}（按公式 ${percent(found.formula)}）；一步需要 ${found.length} 个单位。`);
      const down = picture.clientWidth < 500; // on a phone, time runs downwards
      const along = down ? 16 : Math.min(24, (picture.clientWidth - 60) / found.length);
      const across = down ? Math.min(64, picture.clientWidth / found.rows.length) : 32;
      const [before, labels] = down ? [24, true] : [56, along >= 15];
      const size = [before + found.length * along + 1, found.rows.length * across];
      const [width, height] = down ? size.reverse() : size;
      const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": bubble.textContent });
      found.rows.forEach((row, rank) => {
        const [x, y] = down ? [rank * across, 14] : [0, rank * across + 19];
        svg.append(drawing("text", { x, y, class: "name" }, `rank ${rank}`));
        for (const [kind, stage, number, begin, length] of row) {
          const box = [before + begin * along, rank * across, length * along - 1, across - 6];
          const [x, y, width, height] = down ? [box[1], box[0], box[3], box[2]] : box;
          const group = drawing("g", { class: `part ${kind}` });
          group.append(
            drawing("rect", { x, y, width, height, rx: Math.min(3, along / 4) }),
            drawing("title", {}, `${say(...WORK[kind])}, ${say("stage", "阶段")} ${stage}, micro-batch ${number}`));
          if (labels) group.append(drawing("text", { x: x + width / 2, y: y + height / 2 + 4 }, `${kind}${number}`));
          svg.append(group);
        }
      });
      picture.append(svg);
    }
  }

  // ----------------------------------------------------------- a collective, step by step

  function collectives(place) {
    const all = SITE_DATA.collectives;
    const name = choice(say("Collective", "集合操作"), Object.keys(all), () => go(0));
    const back = element("button", { type: "button" }, say("Back", "后退"));
    const next = element("button", { type: "button" }, say("Next step", "下一步"));
    const where = element("p", { role: "status", "data-result": "collective-step" });
    const table = element("table", { "data-result": "collective-table" });
    let step = 0;
    back.addEventListener("click", () => go(step - 1));
    next.addEventListener("click", () => go(step + 1));
    place.addEventListener("keydown", (event) => {
      if (event.target.tagName === "SELECT") return;
      if (event.key === "ArrowRight") go(step + 1);
      if (event.key === "ArrowLeft") go(step - 1);
    });
    const buttons = element("span", { class: "buttons" }, back, next);
    place.append(element("form", {}, name.row, buttons), where, element("div", { class: "scroll", tabindex: "0" }, table));
    name.select.value = "all_reduce";
    go(0);

    function go(to) {
      const steps = all[name.select.value];
      step = Math.max(0, Math.min(steps.length - 1, to));
      back.disabled = step === 0;
      next.disabled = step === steps.length - 1;
      const changed = [];
      table.replaceChildren(element("tr", {}, element("th"), ...[0, 1, 2, 3].map((c) => element("th", { scope: "col" }, say(`part ${c}`, `第 ${c} 份`)))));
      steps[step].forEach((row, rank) => {
        const line = element("tr", {}, element("th", { scope: "row" }, `rank ${rank}`));
        row.forEach((cell, chunk) => {
          const isNew = step > 0 && cell !== steps[step - 1][rank][chunk];
          if (isNew && cell) changed.push(`rank ${rank}: ${cell}`);
          line.append(element("td", isNew ? { class: "new" } : {}, cell));
        });
        table.append(line);
      });
      where.textContent = step === 0 ? say(`Before the first of ${steps.length - 1} steps.`, `开始之前：共 ${steps.length - 1} 步。`)
        : say(`Step ${step} of ${steps.length - 1}. Received: `, `第 ${step} 步，共 ${steps.length - 1} 步。收到：`) + (changed.join("; ") || "–");
    }
  }

  // ---------------------------------------------------------------- memory over one step

  const MEMORY = {  // in the order in which they are stacked
    parameters: ["parameters", "参数"], optimizer: ["optimizer state", "优化器状态"], gradients: ["gradients", "梯度"],
    activations: ["activations", "激活"], input: ["input", "输入"], temporary: ["temporary buffers", "临时缓冲区"],
    update: ["temporary buffers of the optimizer", "优化器的临时缓冲区"],
  };
  const PHASES = { forward: "前向", backward: "反向", optimizer: "优化器", "backward and optimizer": "反向和优化器" };
  const tones = () => ({ ...SITE_DATA.palette.memory, optimizer: SITE_DATA.palette.memory["optimizer state"], temporary: SITE_DATA.palette.memory.rest });

  /* The bytes of all kinds together, at each point of a step. */
  function totals(series) {
    const [first, ...others] = Object.values(series.bytes);
    return first.map((size, i) => others.reduce((sum, sizes) => sum + sizes[i], size));
  }

  /* A legend, and a picture of each variant of a script. The axes end at DDP's peak, or at a higher one. */
  function memory(place) {
    const all = SITE_DATA.memory.data.series.filter((one) => one.job === place.dataset.job);
    const shown = all.filter((one) => one.technique.split(" ")[0] === place.dataset.script);
    const highest = Math.max(...totals(all.find((one) => one.technique === "torchrun_DDP")));
    const kinds = Object.keys(MEMORY).filter((kind) => shown.some((one) => kind in one.bytes));
    const legend = kinds.map((kind) => element("span", {}, element("i", { style: `background:${tones()[kind]}` }), say(...MEMORY[kind])));
    place.append(element("p", { class: "legend" }, ...legend));
    for (const one of shown) {
      place.append(element("p", {}, element("code", {}, one.technique)));
      area(place, one, kinds, highest);
    }
  }

  function area(place, series, kinds, highest) {
    const [width, height, left, top] = [Math.min(640, place.clientWidth), 250, 58, 20];
    const sums = totals(series), most = Math.max(...sums), end = Math.max(most, highest);
    const x = (share) => left + share * (width - left - 8);
    const y = (size) => top + height * (1 - size / end);
    const title = `${series.technique}, ${series.job}: ${(most / GIB).toFixed(2)} GiB`;
    const svg = drawing("svg", { class: "area", viewBox: `0 0 ${width} ${top + height + 44}`, role: "img", "aria-label": title });
    place.append(svg); // before its text is measured

    let below = sums.map(() => 0);
    for (const kind of kinds.filter((kind) => kind in series.bytes)) {
      const above = below.map((size, i) => size + series.bytes[kind][i]);
      const point = (size, i) => `${x(i / (sums.length - 1)).toFixed(1)},${y(size).toFixed(1)}`;
      const corners = [...above.map(point), ...below.map(point).reverse()];
      const path = drawing("path", { d: `M${corners.join("L")}Z`, fill: tones()[kind] });
      path.append(drawing("title", {}, say(...MEMORY[kind])));
      svg.append(path);
      below = above;
    }

    const round = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];
    const step = GIB * round.find((size) => 6 * size * GIB > end); // at most six lines
    for (let size = 0; size <= end; size += step) {
      svg.append(drawing("path", { class: "line", d: `M${left} ${y(size)}H${width - 8}` }));
      svg.append(drawing("text", { x: left - 6, y: y(size) + 4, "text-anchor": "end" }, String(Number((size / GIB).toFixed(2)))));
    }
    svg.append(drawing("text", { x: 0, y: top - 4 }, "GiB"));
    names(svg, series.phases, x, top + height);

    const at = x(sums.indexOf(most) / (sums.length - 1));
    svg.append(drawing("circle", { cx: at, cy: y(most), r: 3 }));
    svg.append(drawing("text", { x: at, y: y(most) - 6, "text-anchor": at > width - 30 ? "end" : "middle" }, (most / GIB).toFixed(2)));
  }

  /* A line where each phase begins, and the names. One that has no room in any of its phases, as that of an
     optimizer that allocates nothing, is written once on a second line. */
  function names(svg, phases, x, bottom) {
    const wide = new Set(), later = new Map();
    phases.forEach(([begin, name], i) => {
      const [from, to] = [x(begin), x(i + 1 < phases.length ? phases[i + 1][0] : 1)];
      svg.append(drawing("path", { class: "line", d: `M${from} 20V${bottom + 6}` }));
      if (!name) return;
      const text = drawing("text", { x: (from + to) / 2, y: bottom + 20, "text-anchor": "middle" }, say(name, PHASES[name]));
      svg.append(text);
      if (text.getComputedTextLength() < to - from) {
        wide.add(name);
      } else if (later.has(name)) {
        text.remove();
      } else {
        later.set(name, text);
      }
    });
    let taken = 0;
    for (const [name, text] of later) {
      if (wide.has(name)) {
        text.remove();
        continue;
      }
      const half = text.getComputedTextLength() / 2;
      const middle = Math.min(Math.max(Number(text.getAttribute("x")), taken + half), x(1) + 8 - half);
      text.setAttribute("x", middle);
      text.setAttribute("y", bottom + 38);
      taken = middle + half + 8;
    }
  }

  for (const [name, build] of Object.entries({ fit, schedules, collectives, memory })) {
    for (const place of document.querySelectorAll(`[data-widget="${name}"]`)) start(place, build);
  }
})();
