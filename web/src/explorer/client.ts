// Requests to the explorer's server. Only the answer to the newest request counts.
import type { RunAnswer, RunRequest } from "../types";

export interface Client {
  /** The answer, or null where a newer request was sent meanwhile. */
  run: (request: RunRequest) => Promise<RunAnswer | null>;
}

async function errorOf(response: Response): Promise<string> {
  try {
    const body = (await response.json()) as { error?: unknown };
    if (typeof body.error === "string") return body.error;
  } catch {
    // Not JSON: the status has to do.
  }
  return `The server answered with status ${response.status}. Reload the page; if it comes again, restart depthmix explore.`;
}

export function client(address = "api/run"): Client {
  let newest = 0;
  let running: AbortController | null = null;
  return {
    run: async (request) => {
      const sequence = ++newest;
      running?.abort();
      running = new AbortController();
      try {
        const response = await fetch(address, {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify(request),
          signal: running.signal,
        });
        if (sequence !== newest) return null;
        if (!response.ok) throw new Error(await errorOf(response));
        const answer = (await response.json()) as RunAnswer;
        return sequence === newest ? answer : null;
      } catch (error) {
        if (sequence !== newest) return null;
        if (error instanceof TypeError)
          throw new Error("The explorer's server does not answer. Is depthmix explore still running?");
        throw error;
      }
    },
  };
}
