// OpenAI's client for Node against a server with scripted answers (test_node_sdks.py).
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.CHECK_URL}/v1`, apiKey: "any", maxRetries: 0 });
const model = "fake";
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const ask = (text) => [{ role: "user", content: text }];

const chat = await client.chat.completions.create({ model, messages: ask("play:text;") });
assert.equal(chat.choices[0].message.content, "It rains.");
assert.equal(chat.usage.total_tokens, chat.usage.prompt_tokens + chat.usage.completion_tokens);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages: ask("play:text;"), stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "It rains.");
assert.deepEqual(usage, chat.usage);

const runner = client.chat.completions.stream({ model, messages: ask("play:call;"), tools });
const said = (await runner.finalChatCompletion()).choices[0].message;
const [call] = said.tool_calls;
assert.deepEqual(JSON.parse(call.function.arguments), { city: "Łódź" });
const result = { role: "tool", tool_call_id: call.id, content: "seen" };
const next = await client.chat.completions.create({
  model, tools, messages: [...ask("play:call;"), said, result, ...ask("play:text;")],
});
assert.equal(next.choices[0].message.content, "It rains.");

const wanted = { type: "json_schema", json_schema: { name: "city", schema: parameters } };
const read = await client.chat.completions.parse({
  model, messages: ask("play:json;"), response_format: wanted,
});
const after = [...ask("play:json;"), read.choices[0].message, ...ask("play:text;")];
assert.equal(
  (await client.chat.completions.create({ model, messages: after })).choices[0].message.content,
  "It rains.",
);

const answer = await client.responses.create({ model, input: "play:text;" });
assert.equal(answer.output_text, "It rains.");

const flat = [{ type: "function", name: "weather", parameters, strict: false }];
const live = client.responses.stream({ model, input: "play:call;", tools: flat });
const kinds = [];
for await (const event of live) kinds.push(event.type);
const final = await live.finalResponse();
assert.deepEqual(final.output.map((item) => item.type), ["reasoning", "message", "function_call"]);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");
const again = await client.responses.create({
  model, tools: flat, input: [
    ...ask("play:call;"), ...final.output,
    { type: "function_call_output", call_id: final.output[2].call_id, output: "play:text;" },
  ],
});
assert.equal(again.output_text, "It rains.");

const form = { type: "json_schema", name: "city", schema: parameters };
const parsed = await client.responses.parse({ model, input: "play:json;", text: { format: form } });
assert.equal(JSON.parse(parsed.output_text).city, "Łódź");

await assert.rejects(
  client.responses.create({ model: "other", input: "x" }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
await assert.rejects(
  client.chat.completions.create({ model, messages: ask("x"), temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.type === "invalid_request_error",
);
console.log("ok");
