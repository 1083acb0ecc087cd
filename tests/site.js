/* What tests/test_site.py asks of a page in the browser. */
window.siteChecks = {
  /* Code wider than its box, identifiers and options that a line break cuts, a page wider than the screen. */
  layout() {
    const wrong = [];
    const wide = (element) => element.scrollWidth > element.clientWidth + 1;
    const lines = (range) => new Set([...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top / 4)));
    for (const code of document.querySelectorAll("pre > code")) {
      const table = code.closest(".language-text") && window.innerWidth < 720;  // it scrolls
      if (!table && (wide(code) || wide(code.parentElement))) wrong.push(`clipped: ${code.innerText.slice(0, 60)}`);
    }
    for (const cell of document.querySelectorAll("td, th")) {
      const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) {
        for (const word of walk.currentNode.data.matchAll(/[A-Za-z_][\w.]*\w/g)) {
          const range = document.createRange();
          range.setStart(walk.currentNode, word.index);
          range.setEnd(walk.currentNode, word.index + word[0].length);
          if (lines(range).size > 1) wrong.push(`cut: ${word[0]}`);
        }
      }
    }
    for (const option of document.querySelectorAll(".option")) {
      if (lines(option).size > 1) wrong.push(`cut: ${option.innerText}`);
    }
    if (wide(document.documentElement)) wrong.push("the page is wider than the screen");
    return wrong;
  },

  /* Text whose contrast with its background is below WCAG AA: 4.5, or 3 if it is large. */
  contrast() {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const parse = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
      return [red, green, blue, alpha / 255];
    };
    const over = (front, back) => [0, 1, 2].map((i) => front[i] * front[3] + back[i] * (1 - front[3]));
    const luminance = (colour) => {
      const [red, green, blue] = colour.map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const wrong = new Set();
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const element = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
      const range = document.createRange();
      range.selectNodeContents(walk.currentNode);
      const seen = range.getBoundingClientRect().width && element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
      if (!text || !seen || element.closest("script, style, title, option, [disabled]")) continue;
      const style = getComputedStyle(element), layers = [];
      let opacity = 1;
      for (let at = element; at; at = at.parentElement) {
        opacity *= Number(getComputedStyle(at).opacity);
        layers.unshift(parse(getComputedStyle(at).backgroundColor));
      }
      const box = element.closest(".part")?.querySelector("rect");
      const back = box ? parse(getComputedStyle(box).fill).slice(0, 3) : layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
      const front = parse(element.closest("svg") ? style.fill : style.color);
      front[3] *= opacity;
      const [dark, light] = [luminance(over(front, back)), luminance(back)].sort((a, b) => a - b);
      const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      const ratio = (light + 0.05) / (dark + 0.05);
      if (ratio < (large ? 3 : 4.5)) wrong.add(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
    }
    return [...wrong];
  },
};
