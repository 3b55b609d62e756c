// Anthropic's client for Node against a server with scripted answers (test_node_sdks.py).
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.CHECK_URL, apiKey: "any", maxRetries: 0 });
const base = { model: "fake", max_tokens: 300 };
const user = (content) => ({ role: "user", content });
const input_schema = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ name: "weather", input_schema }];
const thinking = { type: "enabled", budget_tokens: 1024 };

const message = await client.messages.create({ ...base, messages: [user("play:text;")] });
assert.deepEqual(message.content, [{ type: "text", text: "It rains." }]);
assert.equal(message.stop_reason, "end_turn");

const asked = { ...base, tools, thinking, messages: [user("play:call;")] };
const stream = client.messages.stream(asked);
let text = "";
let thought = "";
stream.on("text", (delta) => (text += delta));
stream.on("thinking", (delta) => (thought += delta));
const final = await stream.finalMessage();
assert.equal(text, "One moment.");
assert.equal(thought, "I must look.");
assert.deepEqual(final.content.map((block) => block.type), ["thinking", "text", "tool_use"]);
assert.deepEqual(final.content[2].input, { city: "Łódź" });
assert.equal(final.stop_reason, "tool_use");
assert.ok(final.usage.output_tokens > 0);

const again = await client.messages.create({
  ...asked, messages: [
    ...asked.messages, { role: "assistant", content: final.content },
    user([{ type: "tool_result", tool_use_id: final.content[2].id, content: "play:text;" }]),
  ],
});
assert.equal(again.content[0].text, "It rains.");

const counted = await client.messages.countTokens({
  model: "fake", messages: [user("play:text;")],
});
const { input_tokens, cache_read_input_tokens } = message.usage;
assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens);

await assert.rejects(
  client.messages.create({ ...base, model: "other", messages: [user("x")] }),
  (error) =>
    error instanceof Anthropic.NotFoundError && error.error.error.type === "not_found_error",
);
const image = { type: "image", source: { type: "url", url: "x" } };
await assert.rejects(
  client.messages.create({ ...base, messages: [user([image])] }),
  (error) =>
    error instanceof Anthropic.BadRequestError && /'image' is not supported/.test(error.message),
);
console.log("ok");
