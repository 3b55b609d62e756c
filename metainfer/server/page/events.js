// Server-sent events out of pieces of text. Only data counts here; comments keep a line open.

export class EventReader {
  constructor() { this.rest = ""; }

  // The data of every event that is whole with `piece`.
  push(piece) {
    const blocks = (this.rest + piece).split(/\r?\n\r?\n/);
    this.rest = blocks.pop();
    return blocks.map((block) =>
      block.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, "")).join("\n")).filter((data) => data !== "");
  }
}
