// Requests to the server that this page came from, with the tab's key.

const STORED = "metainfer-key";
const keep = () => window.sessionStorage;

export const key = () => keep().getItem(STORED) ?? "";

export function useKey(text) {
  if (text) keep().setItem(STORED, text);
  else keep().removeItem(STORED);
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer to a request; throws `Refused` with the server's own words.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) {
    // A header holds bytes: text beyond Latin-1 goes as its UTF-8 bytes, as the server reads it.
    const raw = String.fromCharCode(...new TextEncoder().encode(key()));
    headers.Authorization = `Bearer ${raw}`;
  }
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Refused(answer.status, body?.error?.message ?? `The server answered ${answer.status}.`);
}
