// Draws the plots in the colours of the style sheet, again whenever those change (light, dark, print), and saves them.
"use strict";
(() => {
  const root = document.documentElement;
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const config = { displayModeBar: false, responsive: true, displaylogo: false };
  const NARROW = 560, PRINTED = 680;

  const themed = (value, style) => {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((item) => themed(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
  };

  const draw = (width) => {
    const style = getComputedStyle(root);
    for (const [id, plot] of Object.entries(plots)) {
      const layout = themed(plot.layout, style);
      const place = document.getElementById(id);
      if (width) layout.width = width;
      if ((width || place.clientWidth) < NARROW) layout.font.size = 11;
      Plotly.react(place, themed(plot.data, style), layout, config);
    }
  };

  const save = (event) => {
    const { save: id, format } = event.currentTarget.dataset;
    const place = document.getElementById(id);
    Plotly.downloadImage(place, { format, filename: id, width: 900, height: place.clientHeight });
  };

  const printing = (isPrinting) => {
    root.toggleAttribute("data-printing", isPrinting);
    for (const details of document.querySelectorAll("details")) details.open = isPrinting || details.dataset.open === "yes";
    draw(isPrinting ? PRINTED : undefined);
  };

  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => {
      if (!root.hasAttribute("data-printing")) details.dataset.open = details.open ? "yes" : "no";
    });
  }
  for (const button of document.querySelectorAll("[data-save]")) button.addEventListener("click", save);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  draw();
})();
