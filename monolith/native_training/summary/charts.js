"use strict";
// What all charts of Monolith's pages share: theme, axes, hover, and the button for a logarithmic axis.
const charts = (() => {
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // A list of our own: one of Plotly's buttons would send the data of the chart to a server of theirs.
  const buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"];
  const config = { responsive: true, displaylogo: false, modeBarButtons: [buttons], plotlyServerURL: "" };
  // The first colours of `charts.py`.
  const colors = ["#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0a7b83", "#57606a"];
  // Plotly takes a text for markup.
  const label = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

  function merge(into, from) {
    for (const [key, value] of Object.entries(from)) {
      into[key] = isObject(value) && isObject(into[key]) ? merge(into[key], value) : value;
    }
    return into;
  }

  function layout(own) {
    const axis = () => ({ gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true });
    return merge({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), size: 12, family: "system-ui, sans-serif" },
      margin: { l: 48, r: 12, t: 28, b: 40 }, barmode: "overlay", bargap: 0, hovermode: "x unified",
      hoverlabel: { bgcolor: style("--paper"), bordercolor: style("--line"), namelength: 40 },
      legend: { orientation: "h", y: -0.3, yanchor: "top" },
      modebar: { orientation: "h", color: style("--soft"), activecolor: style("--ink"),
        bgcolor: "rgba(0,0,0,0)" },
      showlegend: true, xaxis: axis(), yaxis: { ...axis(), hoverformat: ".5~g" },
    }, own || {});
  }

  // Draws, or draws anew; zoom and hidden curves stay as the reader left them.
  const draw = (element, traces, own) =>
    Plotly.react(element, traces, { uirevision: "kept", ...layout(own) }, config);

  function drawFigure(figure) {
    const element = figure.querySelector(".chart"), data = figure.querySelector("script");
    if (!element || element.dataset.drawn) return;
    element.dataset.drawn = "true";
    const { traces, layout: own } = JSON.parse(data.textContent);
    draw(element, traces, own);
    const button = figure.querySelector("button.log");
    if (!button) return;
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", isLog);
      Plotly.relayout(element, { "yaxis.type": isLog ? "log" : "linear", "yaxis.autorange": true });
    });
  }

  // One after the other, so that the page can be read meanwhile: it may have hundreds.
  function drawAll() {
    const figures = [...document.querySelectorAll("figure")], waiting = [...figures];
    const drawNext = () => {
      const figure = waiting.shift();
      if (!figure) return;
      drawFigure(figure);
      setTimeout(drawNext);
    };
    drawNext();
    addEventListener("beforeprint", () => figures.forEach(drawFigure));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      const { font, hoverlabel, modebar, xaxis } = layout();
      const colors = { "font.color": font.color, "hoverlabel.bgcolor": hoverlabel.bgcolor, "modebar.color": modebar.color,
        "modebar.activecolor": modebar.activecolor };
      for (const axis of ["xaxis", "yaxis"]) {
        colors[`${axis}.gridcolor`] = colors[`${axis}.zerolinecolor`] = xaxis.gridcolor;
      }
      for (const element of document.querySelectorAll(".chart[data-drawn]")) Plotly.relayout(element, colors);
    });
  }

  return { colors, draw, drawAll, label };
})();
charts.drawAll();
