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
    if (!place || place.dataset.ready) return;
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
    const all = SITE_DATA.collectives.data;
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

  const find = (name) => document.querySelector(`[data-widget="${name}"]`);
  for (const [name, build] of Object.entries({ fit, schedules, collectives })) start(find(name), build);
})();
