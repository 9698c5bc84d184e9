// A source that reads a file, for Node; onnxa.mjs describes sources.

import { constants } from 'node:fs';
import { open, stat } from 'node:fs/promises';
import { ArchiveError, LimitError } from './onnxa.mjs';

const CHUNK = 1 << 30; // most bytes of one read

/**
 * Opens a regular file. Refuses any other file, and never waits for the other end of a pipe. The caller closes the
 * source.
 */
export async function fileSource(path) {
  const handle = await openWithoutWaiting(path);
  try {
    const stat = await handle.stat();
    if (!stat.isFile()) throw notRegular();
    if (!Number.isSafeInteger(stat.size)) throw new LimitError('the file has 2^53 bytes or more');
    return new FileSource(handle, stat.size);
  } catch (error) {
    await handle.close();
    throw error;
  }
}

async function openWithoutWaiting(path) {
  const { O_RDONLY, O_NONBLOCK = 0, O_NOCTTY = 0 } = constants; // Windows lacks the latter two
  try {
    return await open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
  } catch (error) {
    const status = await stat(path).catch(() => null);
    throw status === null || status.isFile() ? error : notRegular(); // a socket; on some systems a directory
  }
}

const notRegular = () => new ArchiveError('FILE-1', null, 'a regular file', 'something else');

function allocate(length) {
  try {
    return Buffer.allocUnsafeSlow(length);
  } catch {
    throw new LimitError(`no memory for ${length} bytes at once`);
  }
}

class FileSource {
  #handle;

  constructor(handle, size) {
    this.#handle = handle;
    this.size = size;
  }

  async read(offset, length) {
    const bytes = allocate(length);
    for (let done = 0; done < length; ) {
      const most = Math.min(length - done, CHUNK);
      const { bytesRead } = await this.#handle.read(bytes, done, most, offset + done);
      if (bytesRead === 0) throw new Error(`the file ends at ${offset + done}, before its size of ${this.size}`);
      done += bytesRead;
    }
    return bytes;
  }

  close() {
    return this.#handle.close();
  }
}
