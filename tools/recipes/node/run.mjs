// Runs a model of an archive in Node, on float32 inputs of ones; prints the outputs.
// ONNXRUNTIME_NODE_INSTALL=skip npm ci  (skips libraries for CUDA)
// node run.mjs ARCHIVE [MODEL]
//
// The weights are read into memory and checked. They stay mapped in a session of the `.onnx` that `onnxarchive link`
// writes, with the option { extra: { session: { disable_prepacking: '1' } } }.
import * as ort from 'onnxruntime-node';
import { fileSource } from '../../../conformance/readers/javascript/node.mjs';
import { openArchive } from '../../../conformance/readers/javascript/onnxa.mjs';

const [path, model] = process.argv.slice(2);
if (path === undefined) throw new Error('expected: node run.mjs ARCHIVE [MODEL]');
const source = await fileSource(path);
const archive = await openArchive(source);
const bytes = await archive.read(model ? `__MODEL_PROTO_${model}` : '__MODEL_PROTO');
const keys = archive.tensors.filter((tensor) => tensor.model === (model ?? '')).map(({ key }) => key);
const externalData = await Promise.all(keys.map(async (key) => ({ path: key, data: await archive.read(key) })));
await source.close();

const session = await ort.InferenceSession.create(bytes, { externalData });
const feeds = session.inputMetadata.map(({ name, shape }) => {
  const dims = shape.map((size) => (typeof size === 'number' ? size : 1)); // open dimensions are 1
  const count = dims.reduce((product, size) => product * size, 1);
  return [name, new ort.Tensor('float32', new Float32Array(count).fill(1), dims)];
});
for (const [name, { dims, data }] of Object.entries(await session.run(Object.fromEntries(feeds)))) {
  console.log(`${name} [${dims}]: ${data.join(' ')}`);
}
