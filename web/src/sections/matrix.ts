// M of every run side by side, over training.
import { bar, choices, select, setOptions, slider, toggle } from "../controls";
import { el, replace } from "../dom";
import { runLegend, type NamedRun } from "../figure";
import { short } from "../format";
import {
  QUANTITIES,
  groupsOf,
  hasSnapshots,
  scaleValues,
  snapshotGrid,
  traceGrid,
  type Grid,
  type Group,
  type RowFilter,
} from "../grid";
import type { Cursor } from "../matrix";
import { makeCard, remark, whyNot, type Card } from "../matrix_card";
import { domainOf, type Domain } from "../palette";
import { named, notShown, type Section } from "../section";
import type { Run } from "../types";

interface State {
  quantity: string;
  group: Group;
  filter: RowFilter;
  shared: boolean;
  /** Index into the positions of the scrubber; the last is the trace. */
  position: number;
}

/** With more runs than these, the others are hidden until their name is pressed. */
const SHOWN = 9;

function available(run: Run, quantity: string): boolean {
  return traceGrid(run, quantity, "mean") !== null || hasSnapshots(run, quantity);
}

/** Numbers of tokens at which any run kept M. */
function positionsOf(runs: NamedRun[], quantity: string): number[] {
  const all = runs.flatMap(({ run }) => (hasSnapshots(run, quantity) ? (run.snapshots?.tokens ?? []) : []));
  return [...new Set(all)].sort((a, b) => a - b);
}

function gridAt(run: Run, state: State, positions: number[]): Grid | null {
  const tokens = positions[state.position];
  if (tokens === undefined) {
    const final = traceGrid(run, state.quantity, state.group, state.filter);
    return final ?? snapshotGrid(run, state.quantity, (run.snapshots?.steps.length ?? 0) - 1, state.filter);
  }
  const known = run.snapshots?.tokens ?? [];
  const index = Math.max(0, known.filter((each) => each <= tokens).length - 1);
  return hasSnapshots(run, state.quantity) ? snapshotGrid(run, state.quantity, index, state.filter) : null;
}

function defaultQuantity(runs: NamedRun[]): string {
  const traced = runs.filter(({ run }) => run.trace || run.snapshots);
  if (traced.length && traced.every(({ run }) => run.kv_mechanism && run.mechanism === "residual")) return "values";
  return traced.length && traced.every(({ run }) => available(run, "weights")) ? "weights" : "M";
}

function draw(runs: NamedRun[]): HTMLElement[] {
  const quantities = QUANTITIES.filter(({ value }) => runs.some(({ run }) => available(run, value)));
  const state: State = {
    quantity: defaultQuantity(runs),
    group: "mean",
    filter: "all",
    shared: false,
    position: Infinity,
  };
  let positions: number[] = [];
  const move = (card: () => Card, cursor: Cursor | null): void => {
    for (const other of cards) if (other !== card()) other.view.show(cursor);
  };
  const subject = (): string[] => [QUANTITIES.find(({ value }) => value === state.quantity)?.label ?? state.quantity];
  const cards = runs.map((each) => makeCard(each, move, subject));
  const says = el("p", { class: "says" });
  const missing = el("div", {});
  const hidden = new Set(runs.slice(SHOWN).map(({ index }) => index));
  const readers = choices(
    "Readers",
    [
      { value: "all", label: "all" },
      { value: "attn", label: "before attention" },
      { value: "mlp", label: "before MLPs" },
    ],
    "all",
    (value) => {
      state.filter = value as RowFilter;
      redraw();
    },
  );
  const strip = el(
    "span",
    {},
    " The strip at the left marks readers before ",
    el("span", { class: "key attention" }),
    "attention and ",
    el("span", { class: "key mlp" }),
    "MLPs.",
  );
  const redraw = (): void => {
    const quantity = QUANTITIES.find(({ value }) => value === state.quantity);
    const values = state.quantity === "values";
    replace(
      says,
      values
        ? `A cell says ${quantity?.says ?? ""}. Rows are attention layers that cache a value, columns the layers whose values are in it.`
        : `A cell says ${quantity?.says ?? ""}. Rows are readers from the first sublayer down to the head, columns are sources, the newest at the right end of each row.`,
    );
    strip.hidden = values;
    readers.hidden = values;
    const grids = cards.map((card) => gridAt(card.run, state, positions));
    const kind = grids.find((grid) => grid)?.kind ?? "sequential";
    const all = state.shared
      ? domainOf(
          grids.flatMap((grid) => (grid ? scaleValues(grid) : [])),
          kind,
        )
      : null;
    cards.forEach((card, index) => {
      const grid = grids[index];
      card.note.textContent = remark(card.run, state.quantity);
      card.node.hidden = !grid || hidden.has(card.index);
      const domain: Domain | null = grid ? (all ?? domainOf(scaleValues(grid), grid.kind)) : null;
      if (grid && domain) card.view.update(grid, domain);
    });
    const lacking = cards.filter((card, index) => !grids[index] && !hidden.has(card.index));
    replace(missing, notShown(lacking.map(({ run }) => ({ run, text: whyNot(run, state.quantity) }))));
  };
  const scrubber = slider(
    "Training",
    { low: 0, high: 0, step: 1, value: 0 },
    (value) => {
      state.position = value;
      label();
      redraw();
    },
    "training-scrubber",
  );
  const label = (): void => {
    const tokens = positions[state.position];
    scrubber.show(tokens === undefined ? "end" : `${short(tokens)} tokens`);
  };
  const groups = select(
    "Head or group",
    [],
    "mean",
    (value) => {
      state.group = value === "mean" ? "mean" : Number(value);
      redraw();
    },
    "group",
  );
  const adapt = (): void => {
    const most = Math.max(1, ...runs.map(({ run }) => groupsOf(run, state.quantity)));
    groups.node.hidden = most < 2;
    setOptions(
      groups.select,
      [
        { value: "mean", label: "mean over all" },
        ...[...Array(most).keys()].map((g) => ({ value: String(g), label: String(g + 1) })),
      ],
      String(state.group),
    );
    state.group = groups.select.value === "mean" ? "mean" : Number(groups.select.value);
    positions = positionsOf(runs, state.quantity);
    state.position = positions.length;
    scrubber.input.max = String(positions.length);
    scrubber.input.value = String(positions.length);
    scrubber.input.disabled = positions.length === 0;
    label();
    redraw();
  };
  const controls = bar(
    select(
      "Quantity",
      quantities,
      state.quantity,
      (value) => {
        state.quantity = value;
        adapt();
      },
      "quantity",
    ).node,
    groups.node,
    readers,
    scrubber.node,
    toggle(
      "same colours for all runs",
      state.shared,
      (on) => {
        state.shared = on;
        redraw();
      },
      "shared-scale",
    ),
  );
  adapt();
  return [
    el(
      "div",
      { class: "card" },
      controls,
      runs.length > 1 ? runLegend(runs, hidden, redraw) : null,
      says,
      el(
        "p",
        { class: "hint" },
        "Point at a cell or walk with the arrow keys; all matrices follow.",
        strip,
        " Colours end at the 99 % quantile and leave out the first row, which has one source.",
      ),
    ),
    el("div", { class: "multiples" }, ...cards.map((card) => card.node)),
    missing,
  ];
}

export const matrixSection: Section = {
  id: "matrix",
  label: "Matrices",
  title: "What each layer reads",
  intro: "Which earlier outputs does a sublayer take in, and how much of each?",
  draw: (page) => {
    const runs = named(page);
    if (!runs.some(({ run }) => run.trace || run.snapshots)) {
      return [notShown(runs.map(({ run }) => ({ run, text: whyNot(run, "M") })))];
    }
    return draw(runs);
  },
};
