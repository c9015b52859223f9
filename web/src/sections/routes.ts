// The strongest routes as arcs over depth, and the same as a table.
import { max, scaleLinear } from "d3";
import { bar, select, slider, toggle } from "../controls";
import { el, replace, sideways, svg } from "../dom";
import { figure, subject, type NamedRun } from "../figure";
import { change, interval, number, percent, visible } from "../format";
import { kindName, outputLabel, outputName, readerName } from "../names";
import { absent, mostTelling, named, type Section } from "../section";
import { routesOf, type Route, type RouteOrder } from "../routes";
import { table, type Cell } from "../table";
import type { Run } from "../types";

const HEIGHT = 270;
const BASE = 214;

type Verdict = "rises" | "falls" | "unclear" | "unmeasured";

export function effectOf(route: Route): Verdict {
  if (!route.effect) return "unmeasured";
  const { mean, low, high } = route.effect.loss;
  if ((low ?? mean) > 0) return low === null ? "unclear" : "rises";
  return high !== null && high < 0 ? "falls" : "unclear";
}

const KEY: [Verdict, string][] = [
  ["rises", "cutting it raises the loss"],
  ["falls", "cutting it lowers the loss"],
  ["unclear", "no effect told from 0"],
  ["unmeasured", "not measured"],
];

const COLOURS: Record<Verdict, string> = {
  rises: "var(--run-2)",
  falls: "var(--run-1)",
  unclear: "var(--run-5)",
  unmeasured: "var(--run-0)",
};

function axis(run: Run, x: (place: number) => number, step: number): SVGElement[] {
  const nodes: SVGElement[] = [];
  for (let place = 0; place <= run.depth + 1; place++) {
    const kind = place === 0 || place > run.depth ? "end" : run.kinds[place - 1] === "attn" ? "attention" : "mlp";
    const y = BASE + 5;
    nodes.push(
      kind === "mlp"
        ? svg("rect", { x: x(place) - 3.5, y: y - 3.5, width: 7, height: 7, class: "node kind-mlp" })
        : svg("circle", { cx: x(place), cy: y, r: kind === "end" ? 5 : 4, class: `node kind-${kind}` }),
    );
    const text = place > run.depth ? "head" : outputLabel(place);
    const near = (place > 0 && place < step) || (place <= run.depth && place > run.depth + 1 - step);
    if (place === 0 || place > run.depth || (place % step === 0 && !near)) {
      nodes.push(svg("text", { x: x(place), y: BASE + 24, "text-anchor": "middle" }, text));
    }
  }
  nodes.push(svg("text", { x: x(0), y: BASE + 44, class: "axis-title" }, "depth (embedding, sublayers, head) →"));
  return nodes;
}

function arcs(run: Run, routes: Route[], order: RouteOrder, width: number): SVGSVGElement {
  const x = scaleLinear([0, run.depth + 1], [26, width - 26]);
  const most = max(routes, (route) => Math.abs(route[order])) ?? 1;
  const step = Math.max(1, Math.ceil(24 / (x(1) - x(0))));
  const paths = [...routes].reverse().map((route) => {
    const [from, to] = [x(route.source), x(route.row + 1)];
    const height = Math.min(BASE - 14, 18 + (BASE - 32) * ((to - from) / (width - 52)) ** 0.7);
    const says =
      `${outputName(run.kinds, route.source)} → ${readerName(run.kinds, route.row)}: share ${percent(route.share)}, ` +
      `contribution ${number(route.contribution)}, ${route.effect ? `effect on loss ${interval(route.effect.loss)}` : "effect not measured"}`;
    return svg(
      "path",
      {
        d: `M${from},${BASE} C${from},${BASE - height * 1.33} ${to},${BASE - height * 1.33} ${to},${BASE}`,
        class: `arc ${effectOf(route)}`,
        "stroke-width": (1 + 8 * (Math.abs(route[order]) / most)).toFixed(2),
        "data-test": "route",
        "data-row": route.row,
        "data-source": route.source,
      },
      svg("title", {}, says),
    );
  });
  const title =
    `Arcs of the ${routes.length} strongest routes: ` +
    routes
      .slice(0, 5)
      .map(
        (route) =>
          `${outputName(run.kinds, route.source)} to ${readerName(run.kinds, route.row)}, ${percent(route.share)}`,
      )
      .join("; ");
  return svg(
    "svg",
    {
      role: "img",
      "aria-label": title,
      viewBox: `0 0 ${width} ${HEIGHT}`,
      class: "routes",
      style: `min-width:${Math.min(width, 540)}px`,
    },
    svg("g", { class: "arcs" }, ...paths),
    svg("g", { class: "axis" }, ...axis(run, x, step)),
  );
}

function effectCell(route: Route): Cell {
  if (!route.effect) return "not measured";
  const { mean, low, high } = route.effect.loss;
  const range =
    low === null || high === null ? null : el("small", { class: "range" }, `${change(low)} to ${change(high)}`);
  return el("span", {}, change(mean), range ? el("br") : null, range);
}

/** Place 0 is the embedding, L + 1 the head. */
function shortPlace(run: Run, place: number): string {
  if (place === 0) return "embedding";
  return place > run.depth ? "head" : `${place} (${kindName(run.kinds[place - 1])})`;
}

function routeTable(run: Run, routes: Route[]): HTMLElement {
  return table({
    caption: `${visible(run.name)}: the ${routes.length} strongest routes, cosine share, contribution ‖M v‖, and change of the loss when the route is cut (nats per token).`,
    headings: ["source", "reader", "share", "contribution", "effect of a cut on the loss"],
    rows: routes.map((route) => [
      shortPlace(run, route.source),
      shortPlace(run, route.row + 1),
      percent(route.share),
      number(route.contribution),
      effectCell(route),
    ]),
    numeric: [2, 3],
  });
}

function key(): HTMLElement {
  return el(
    "div",
    { class: "key-row" },
    ...KEY.map(([name, label]) =>
      el("span", {}, el("span", { class: `arc-key ${name}`, "aria-hidden": "true" }), label),
    ),
  );
}

const has = (run: Run): boolean =>
  routesOf(run, "share", false).length > 0 || routesOf(run, "contribution", false).length > 0;

export const routesSection: Section = {
  id: "routes",
  label: "Routes",
  title: "Strongest routes",
  intro: "Which skips through depth carry most, and do they matter?",
  draw: (page) => {
    const all = named(page);
    const runs: NamedRun[] = all.filter(({ run }) => has(run));
    const note = absent(all, has, /trace|contribution|share/i, "no trace was saved, so no contributions are known.");
    if (!runs.length) return [note];
    const ablated = runs.filter(({ run }) => run.ablation);
    const first = mostTelling(ablated.length ? ablated : runs);
    const state = { run: first.run, order: "share" as RouteOrder, skip: true, top: 20 };
    const drawing = sideways("Arcs, scroll sideways if they are wide");
    const list = el("div", {});
    const about = subject();
    const orders = [
      { value: "share", label: "cosine share" },
      { value: "contribution", label: "contribution ‖M v‖" },
    ];
    const redraw = (): void => {
      about.set(
        state.run.name,
        orders.find(({ value }) => value === state.order)?.label ?? "",
        state.skip ? "without newest sources" : "with newest sources",
      );
      const routes = routesOf(state.run, state.order, state.skip).slice(0, state.top);
      replace(drawing, arcs(state.run, routes, state.order, 680));
      replace(list, routeTable(state.run, routes));
      top.show(String(routes.length));
    };
    const top = slider(
      "Routes shown",
      { low: 5, high: 60, step: 1, value: state.top },
      (value) => {
        state.top = value;
        redraw();
      },
      "route-count",
    );
    const controls = bar(
      runs.length > 1
        ? select(
            "Run",
            runs.map(({ run, index }) => ({ value: String(index), label: run.name })),
            String(first.index),
            (value) => {
              state.run = runs.find(({ index }) => String(index) === value)?.run ?? state.run;
              redraw();
            },
            "route-run",
          ).node
        : null,
      select("Width of an arc", orders, "share", (value) => {
        state.order = value as RouteOrder;
        redraw();
      }).node,
      top.node,
      toggle("leave out newest sources", true, (on) => {
        state.skip = on;
        redraw();
      }),
    );
    redraw();
    return [
      el(
        "div",
        { class: "beside" },
        figure(
          {
            title: "Routes over depth",
            name: "routes",
            subject: about,
            controls,
            legend: () =>
              KEY.map(([verdict, name]) => ({
                name,
                colour: COLOURS[verdict],
                dash: verdict === "unclear" ? "6 4" : "",
              })),
            says: "An arc runs from a source to the sublayer that reads it; a wider arc carries more. Circles are attention, squares MLPs.",
            hint: "Point at an arc for its figures. Weight alone is no proof of importance: colours come from cutting the route and measuring the loss.",
          },
          key(),
          drawing,
        ),
        list,
      ),
      note,
    ];
  },
};
