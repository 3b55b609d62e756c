// The AI SDK with its OpenAI-compatible provider against a server with scripted answers.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "metainfer", baseURL: `${process.env.CHECK_URL}/v1`, includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("fake");
const properties = { city: { type: "string" } };
const schema = jsonSchema({ type: "object", properties, required: ["city"] });

const { text, usage } = await generateText({ model, prompt: "play:text;", maxRetries: 0 });
assert.equal(text, "It rains.");
assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);

const stream = streamText({ model, prompt: "play:text;", maxRetries: 0 });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
assert.equal(streamed, "It rains.");
assert.equal((await stream.usage).outputTokens, usage.outputTokens);

const cities = [];
const weather = tool({
  inputSchema: schema,
  execute: async ({ city }) => (cities.push(city), "play:text;"),
});
for (const run of [generateText, streamText]) {
  const result = await run({
    model, prompt: "play:call;", tools: { weather }, stopWhen: stepCountIs(2), maxRetries: 0,
  });
  const steps = await result.steps;
  assert.equal(steps[0].reasoningText, "I must look.");
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(await result.text, "It rains.");
}
assert.deepEqual(cities, ["Łódź", "Łódź"]);

const { output } = await generateText({
  model, prompt: "play:json;", output: Output.object({ schema }), maxRetries: 0,
});
assert.equal(output.city, "Łódź");

await assert.rejects(
  generateText({ model: provider("other"), prompt: "x", maxRetries: 0 }),
  (error) =>
    APICallError.isInstance(error) && error.statusCode === 404 && /not served/.test(error.message),
);
console.log("ok");
