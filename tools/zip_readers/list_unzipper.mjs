import unzipper from "unzipper";

import { extracts, forEachPath, sha256 } from "./each_path.mjs";

await forEachPath(async function* (path) {
  // unzipper reads `padding` bytes more than an entry's data, for the local header's extra fields.
  const directory = await unzipper.Open.file(path, { padding: 0xffff });
  for (const entry of directory.files) {
    const digest = extracts ? await sha256(entry.stream()) : null;
    yield [entry.path, entry.uncompressedSize, entry.crc32, digest];
  }
});
