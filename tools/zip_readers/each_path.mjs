import { createHash } from "node:crypto";
import { createInterface } from "node:readline";

/**
 * Reads paths from standard input, one a line, and prints a line of JSON for each: the `entries`
 * that `read` yields, as [name, size, CRC-32, SHA-256], or an `error`.
 */
export async function forEachPath(read) {
  for await (const path of createInterface({ input: process.stdin })) {
    let found;
    try {
      const entries = [];
      for await (const entry of read(path)) entries.push(entry);
      found = { entries };
    } catch (error) {
      found = { error: String(error.message ?? error) };
    }
    console.log(JSON.stringify(found));
  }
}

/** True to read the data, false to list the directory only. */
export const extracts = process.argv.at(-1) === "extract";

/** The SHA-256 of a stream, in hexadecimal digits. */
export async function sha256(stream) {
  const hash = createHash("sha256");
  for await (const piece of stream) hash.update(piece);
  return hash.digest("hex");
}
