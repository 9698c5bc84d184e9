// Sessions of ONNX Runtime Web on ONNX archives.

import { httpSource, openArchive } from 'onnxa';
import * as ort from 'onnxruntime-web';

const REQUESTS = 6; // at once: the most connections that browsers open to a server

/**
 * Makes a session of the archive at a URL. Downloads the directory, all models and the weights of
 * the chosen model by range requests, and checks each CRC-32.
 *
 * `model` is the id of the model, or '' for the default one. Other options are those of ONNX Runtime.
 */
export async function createSession(url, { model = '', ...options } = {}) {
  const archive = await openArchive(await httpSource(url));
  const name = model === '' ? '__MODEL_PROTO' : `__MODEL_PROTO_${model}`;
  const keys = archive.tensors.filter((tensor) => tensor.model === model).map(({ key }) => key);
  const [bytes, externalData] = await Promise.all([archive.read(name), readWeights(archive, keys)]);
  return ort.InferenceSession.create(bytes, { ...options, externalData });
}

/** Reads tensors for ONNX Runtime's `externalData`: the location (the key) and the data of each tensor. */
async function readWeights(archive, keys) {
  const weights = [];
  const waiting = keys.values();
  const readInTurn = async () => {
    for (const key of waiting) weights.push({ path: key, data: await archive.read(key) });
  };
  await Promise.all(Array.from({ length: REQUESTS }, readInTurn));
  return weights;
}
