import yauzl from "yauzl";

import { extracts, forEachPath, sha256 } from "./each_path.mjs";

await forEachPath(async function* (path) {
  const file = await yauzl.openPromise(path, { strictFileNames: true });
  for await (const entry of file.eachEntry()) {
    const digest = extracts ? await sha256(await file.openReadStreamPromise(entry)) : null;
    yield [entry.fileName, entry.uncompressedSize, entry.crc32, digest];
  }
});
