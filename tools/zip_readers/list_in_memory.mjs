import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";

import AdmZip from "adm-zip";
import { unzipSync } from "fflate";
import JSZip from "jszip";

import { extracts, forEachPath } from "./each_path.mjs";

const digest = (data) => createHash("sha256").update(data).digest("hex");

/** For each package, a function that takes the bytes of an archive and yields the entries. */
const readers = {
  *"adm-zip"(archive) {
    for (const entry of new AdmZip(archive).getEntries()) {
      const { size, crc } = entry.header;
      yield [entry.entryName, size, crc, extracts ? digest(entry.getData()) : null];
    }
  },

  *fflate(archive) {
    const listed = [];
    const filter = (entry) => listed.push(entry) > 0;
    const data = unzipSync(archive, { filter });
    for (const { name, originalSize } of listed) {
      yield [name, originalSize, null, extracts ? digest(data[name]) : null];
    }
  },

  async *jszip(archive) {
    const zip = await JSZip.loadAsync(archive, { checkCRC32: extracts });
    for (const entry of Object.values(zip.files)) {
      const data = await entry.async("nodebuffer");
      yield [entry.name, data.length, null, extracts ? digest(data) : null];
    }
  },
};

await forEachPath(async function* (path) {
  yield* readers[process.argv[2]](await readFile(path));
});
