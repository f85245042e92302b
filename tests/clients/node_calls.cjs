// Calls a server with clients of Node: NODE_PATH=FOLDER/node_modules node node_calls.cjs URL
const assert = require("node:assert");
const { default: OpenAI } = require("openai");
const { default: Anthropic } = require("@anthropic-ai/sdk");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { embed, generateText, Output, streamText, tool } = require("ai");
const { z } = require("zod");

const url = process.argv[2];
const [key, model, prompt] = ["none", "tiny", "What is the sum of two and three?"];
const messages = [{ role: "user", content: prompt }];
const digit = z.number().int().min(0).max(9);
const sum = z.object({ left: digit, right: digit }).strict();
const add = tool({ description: "Add two numbers.", inputSchema: sum });
const given = { prompt, maxOutputTokens: 100, temperature: 0, maxRetries: 0 };

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
  const asked = { model, messages, max_tokens: 20, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
    text += chunk.choices[0]?.delta.content ?? "";
  assert(text && text === whole.choices[0].message.content);
  const told = await client.responses.create({ model, input: prompt, max_output_tokens: 20 });
  const counted = await client.responses.inputTokens.count({ model, input: prompt });
  assert.equal(counted.input_tokens, told.usage.input_tokens);
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const whole = await client.messages.create({ model, messages, max_tokens: 20 });
  const stream = client.messages.stream({ model, messages, max_tokens: 20 });
  assert(whole.content[0].text && (await stream.finalMessage()).content[0].text);
  const counted = await client.messages.countTokens({ model, messages });
  assert.equal(counted.input_tokens, whole.usage.input_tokens);
}

async function check(model) {
  const whole = await generateText({ model, ...given });
  const stream = streamText({ model, ...given });
  assert(whole.text && (await stream.text) === whole.text);
  const tools = { add };
  const called = await generateText({ model, ...given, tools, toolChoice: "required" });
  assert.equal(called.toolCalls[0].toolName, "add");
  const typed = await generateText({ model, ...given, output: Output.object({ schema: sum }) });
  sum.parse(typed.output);
}

const settings = { baseURL: `${url}/v1`, apiKey: key };
const provider = createOpenAI(settings);
const compatible = createOpenAICompatible({ name: "served", supportsStructuredOutputs: true, ...settings });
const checks = {
  openai,
  anthropic,
  "ai as chats": () => check(provider.chat(model)),
  "ai as responses": () => check(provider.responses(model)),
  "ai as a compatible server": () => check(compatible(model)),
  "ai as messages": () => check(createAnthropic(settings)(model)),
  "ai, vectors": async () =>
    assert((await embed({ model: provider.embedding(model), value: "x" })).embedding.length),
};

(async () => {
  let failed = 0;
  for (const [name, work] of Object.entries(checks)) {
    try {
      await work();
      console.log("ok", name);
    } catch (error) {
      failed += 1;
      console.error("FAILED", name, error);
    }
  }
  process.exit(failed);
})();
