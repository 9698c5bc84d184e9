// Prints what a full check of an archive finds, as one JSON object: node read.mjs [--open] PATH
// With --open it only opens the archive.

import { createHash } from 'node:crypto';
import { fileSource } from './node.mjs';
import { ArchiveError, LimitError, openArchive } from './onnxa.mjs';

const SHA256_OF_NOTHING = createHash('sha256').digest('hex');

/** A BigInt for JSON: a number below 2^53, otherwise a string of digits. */
const exact = (number) => (number <= Number.MAX_SAFE_INTEGER ? Number(number) : String(number));

async function report(source, isFull) {
  const archive = await openArchive(source);
  const hashes = isFull ? await hashTensors(archive) : new Map();
  return {
    accepted: true,
    entries: archive.entries.map(({ name, headerOffset, dataOffset, size, crc32 }) => ({
      name,
      header_offset: headerOffset,
      data_offset: dataOffset,
      nbytes: size,
      crc32,
    })),
    tensors: archive.tensors.map(({ model, key, name, dataType, dims }) => ({
      model,
      key,
      name,
      data_type: dataType,
      dims: dims.map(exact),
      sha256: hashes.get(key),
    })),
  };
}

/** Makes the full check; returns a map from each key to the SHA-256 of the entry's data. */
async function hashTensors(archive) {
  const hashes = new Map(archive.tensors.map(({ key }) => [key, SHA256_OF_NOTHING]));
  let hash = null;
  let done = 0;
  await archive.check({
    onData(entry, bytes) {
      if (!hashes.has(entry.name)) return;
      hash ??= createHash('sha256');
      hash.update(bytes);
      done += bytes.length;
      if (done === entry.size) {
        hashes.set(entry.name, hash.digest('hex'));
        [hash, done] = [null, 0];
      }
    },
  });
  return hashes;
}

async function verdict(path, isFull) {
  let source;
  try {
    source = await fileSource(path);
    return await report(source, isFull);
  } catch (error) {
    if (error instanceof ArchiveError) {
      return { accepted: false, rule: error.rule, entry: error.entry, message: error.message };
    }
    if (error instanceof LimitError) return { accepted: null, message: error.message };
    throw error;
  } finally {
    await source?.close();
  }
}

const words = process.argv.slice(2);
const isFull = words[0] !== '--open';
const paths = isFull ? words : words.slice(1);
if (paths.length !== 1) {
  console.error('usage: node read.mjs [--open] PATH');
  process.exitCode = 2;
} else {
  try {
    process.stdout.write(`${JSON.stringify(await verdict(paths[0], isFull))}\n`);
  } catch (error) {
    console.error(`${paths[0]}: ${error.message}`);
    process.exitCode = 2;
  }
}
