// Runs a sequence classifier of transformers.js in a local directory; prints the logits of a text.
// ONNXRUNTIME_NODE_INSTALL=skip npm ci  (skips libraries for CUDA)
// node run.mjs DIRECTORY TEXT
import { resolve } from 'node:path';
import { AutoModelForSequenceClassification, AutoTokenizer, env } from '@huggingface/transformers';

const [folder, text] = process.argv.slice(2);
const directory = resolve(folder);
env.allowRemoteModels = false;
env.localModelPath = '';
const tokenizer = await AutoTokenizer.from_pretrained(directory);
const model = await AutoModelForSequenceClassification.from_pretrained(directory, { dtype: 'fp32' });
const { logits } = await model(await tokenizer(text));
console.log(JSON.stringify(logits.tolist()[0]));
