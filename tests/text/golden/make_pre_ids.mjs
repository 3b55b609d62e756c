// Writes pre_ids.json: ids of pre_vocab.json's texts under each rule, by an independent engine.
//
//   python tests/text/golden/make_pre.py FOLDER
//   node make_pre_ids.mjs FOLDER            (packages as for make_ids.mjs)
import {readFileSync, readdirSync, writeFileSync} from "node:fs";
import {createRequire} from "node:module";
import {basename, dirname, join} from "node:path";
import {fileURLToPath, pathToFileURL} from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2];
const require = createRequire(join(process.cwd(), "package.json"));
const entry = require.resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(entry).href);
const manifest = JSON.parse(readFileSync(join(dirname(entry), "..", "package.json"), "utf8"));

const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const {texts} = JSON.parse(readFileSync(join(here, "pre_vocab.json"), "utf8"));
const ids = {};
const refused = [];
for (const file of readdirSync(folder).filter((name) => name.endsWith(".gguf")).sort()) {
    const name = basename(file, ".gguf");
    try {
        const model = await llama.loadModel({
            modelPath: join(folder, file), vocabOnly: true, gpuLayers: 0
        });
        ids[name] = texts.map((text) => Array.from(model.tokenize(text, false)));
        await model.dispose();
    } catch (error) {
        refused.push(name);
        console.error(name, String(error));
    }
}
const body = {engine: `node-llama-cpp ${manifest.version}`, refused, ids};
writeFileSync(join(here, "pre_ids.json"), JSON.stringify(body) + "\n");
console.log(Object.keys(ids).length, "rules;", "refused:", refused.join(" ") || "none");
process.exit(0);
