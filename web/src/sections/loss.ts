// Loss curves of all runs.
import { chart, describe, lines, type Series } from "../chart";
import { bar, choices, toggle } from "../controls";
import { figure, legendEntries, runLegend, type NamedRun } from "../figure";
import { duration, loss, short } from "../format";
import { runStyle } from "../palette";
import { absent, named, type Section } from "../section";
import type { Curve, Run } from "../types";

type Axis = "tokens" | "seconds";

function points(curve: Curve | undefined, axis: Axis): { x: number; y: number }[] {
  return (curve?.loss ?? [])
    .map((value, index) => ({ x: curve?.[axis][index] ?? NaN, y: value ?? NaN }))
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y));
}

function seriesOf({ run, index }: NamedRun, axis: Axis, train: boolean): Series[] {
  const { colour, dash } = runStyle(index);
  const all: Series[] = [];
  if (train) all.push({ name: `${run.name}, training`, colour, thin: true, points: points(run.curves?.train, axis) });
  const validation = points(run.curves?.validation, axis);
  return [...all, { name: run.name, colour, dash, points: validation, dots: validation.length < 60 }];
}

/** The losses shown after the first fifth, so that differences at the end can be seen. */
function endDomain(all: Series[]): [number, number] | undefined {
  const last = Math.max(...all.flatMap((series) => series.points.map(({ x }) => x)));
  const values = all.flatMap((series) => series.points.filter(({ x }) => x >= last / 5).map(({ y }) => y));
  if (values.length < 2) return undefined;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return [low - 0.1 * (high - low), high + 0.02 * (high - low)];
}

/** With fewer validation losses than these, a line says too little: the losses of training are shown as well. */
const ENOUGH = 3;

const hasCurve = (run: Run): boolean =>
  points(run.curves?.validation, "tokens").length + points(run.curves?.train, "tokens").length > 0;

export const lossSection: Section = {
  id: "loss",
  label: "Loss",
  title: "Loss",
  intro: "Does the mechanism help? The same data for every run; lower is better.",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => hasCurve(run));
    const note = absent(all, hasCurve, /curve|metrics|loss/i, "no losses were recorded.");
    if (!runs.length) return [note];
    const hidden = new Set<number>();
    const state = {
      axis: "tokens" as Axis,
      zoom: runs.length > 1,
      train: !runs.every(({ run }) => points(run.curves?.validation, "tokens").length >= ENOUGH),
    };
    const current = (): Series[] =>
      runs.filter(({ index }) => !hidden.has(index)).flatMap((each) => seriesOf(each, state.axis, state.train));
    const picture = chart(
      (width) => {
        const series = current();
        const domain = state.zoom ? endDomain(series) : undefined;
        const x =
          state.axis === "tokens"
            ? { label: "tokens read", format: short }
            : { label: "wall-clock time", format: duration };
        return lines(width, series, {
          x,
          y: { label: "loss (nats per token)", domain, format: (value) => String(Number(value.toPrecision(4))) },
          height: Math.max(260, Math.min(420, width * 0.45)),
        });
      },
      () => `Loss: ${describe(current(), loss)}.`,
    );
    const controls = bar(
      choices(
        "Against",
        [
          { value: "tokens", label: "tokens" },
          { value: "seconds", label: "wall-clock time" },
        ],
        "tokens",
        (value) => {
          state.axis = value as Axis;
          picture.redraw();
        },
      ),
      toggle("leave out the start", state.zoom, (on) => {
        state.zoom = on;
        picture.redraw();
      }),
      toggle(
        "training losses",
        state.train,
        (on) => {
          state.train = on;
          picture.redraw();
        },
        "training-losses",
      ),
    );
    return [
      note,
      figure(
        {
          title: "Loss during training",
          name: "loss",
          legend: () => legendEntries(runs, hidden),
          controls,
          says: "Thick lines are the validation loss; thin lines, where they are switched on, are the loss of each recorded training step.",
          hint: "Point at a line for its values. Press a name to hide its line.",
        },
        runLegend(runs, hidden, picture.redraw),
        picture.node,
      ),
    ];
  },
};
