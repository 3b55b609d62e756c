// Writes smollm2_ids.json: token ids that an independent engine gives for texts.json.
//
//   npm install --omit=optional --ignore-scripts node-llama-cpp@3.21.1 @node-llama-cpp/linux-x64@3.21.1
//   node make_ids.mjs MODEL.gguf            (run where node_modules can be found)
//
// The packages' prebuilt CPU binary is in the second package; nothing is compiled.
import {readFileSync, writeFileSync} from "node:fs";
import {createHash} from "node:crypto";
import {createRequire} from "node:module";
import {dirname, join} from "node:path";
import {fileURLToPath, pathToFileURL} from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const modelPath = process.argv[2];
// Resolved from the working directory, so that the script can stay in the repository.
const require = createRequire(join(process.cwd(), "package.json"));
const entry = require.resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);
const manifest = JSON.parse(
    readFileSync(join(dirname(entry), "..", "package.json"), "utf8")
);

const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath, vocabOnly: true, gpuLayers: 0});
const texts = JSON.parse(readFileSync(join(here, "texts.json"), "utf8"));
const rows = texts.map((text) => ({
    text,
    ids: model.tokenize(text, true),
    plain: model.tokenize(text, false)
}));
const body = {
    engine: `node-llama-cpp ${manifest.version}`,
    llama_cpp: llama.llamaCppRelease?.release ?? "unknown",
    model_sha256: createHash("sha256").update(readFileSync(modelPath)).digest("hex"),
    note: "ids: special tokens in the text are read as such; plain: they are not",
    rows
};
writeFileSync(join(here, "smollm2_ids.json"), JSON.stringify(body, null, 1) + "\n");
console.log(`${rows.length} texts, ${body.engine}, llama.cpp ${body.llama_cpp}`);
process.exit(0);
