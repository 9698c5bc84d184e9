import { open } from "node:fs/promises";

import { configure, Reader, ZipReader } from "@zip.js/zip.js";

import { extracts, forEachPath, sha256 } from "./each_path.mjs";

configure({ useWebWorkers: false });

/** Reads ranges of an open file; zip.js has no reader for an open file. */
class FileReader extends Reader {
  constructor(file) {
    super();
    this.file = file;
  }

  async init() {
    super.init?.();
    this.size = (await this.file.stat()).size;
  }

  async readUint8Array(index, length) {
    const bytes = new Uint8Array(Math.min(length, this.size - index));
    let done = 0;
    while (done < bytes.length) {
      const { bytesRead } = await this.file.read(bytes, done, bytes.length - done, index + done);
      if (bytesRead === 0) throw new Error(`the file ends before byte ${index + length}`);
      done += bytesRead;
    }
    return bytes;
  }
}

async function digestOf(entry) {
  const { readable, writable } = new TransformStream();
  const [digest] = await Promise.all([
    sha256(readable),
    entry.getData(writable, { checkCrc32: true, checkOverlappingEntry: true }),
  ]);
  return digest;
}

await forEachPath(async function* (path) {
  const file = await open(path);
  try {
    // "strict" refuses ambiguous archives.
    const reader = new ZipReader(new FileReader(file), { strictness: "strict" });
    for await (const entry of reader.getEntriesGenerator()) {
      const digest = extracts ? await digestOf(entry) : null;
      yield [entry.filename, entry.uncompressedSize, entry.signature, digest];
    }
    await reader.close();
  } finally {
    await file.close();
  }
});
