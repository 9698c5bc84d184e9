// A reader of ONNX archives, version 1, for browsers and servers. It needs only the language and
// TextDecoder, and `fetch` for `httpSource`. The parts: errors, sources, checksums, end records,
// directory, local headers, names, the models, tensors, and the archive that puts them together.
//
// A source is { size, read(offset, length) -> Promise<Uint8Array> }. Offsets and sizes have the type number. Only
// fields of 64 bits can hold values above 2^53. These values are rounded, still exceed the size of every file, and are
// refused.

const MODEL_NAME = '__MODEL_PROTO';
const FURTHER_MODEL = '__MODEL_PROTO_'; // and the id
const ASSETS = 'assets/';
const ALIGNMENT = 64;
const MAX_ALIGNMENT = 32768;
const MAX_PADDING = 32767;
const MAX_ENTRIES = 262144;
const MAX_NAME = 1024;
const MODEL_END = 2 ** 31; // models are smaller
const SATURATED16 = 0xffff;
const SATURATED32 = 0xffffffff;
const PIECE = 4 << 20; // bytes that a full check reads at once

// ---------------------------------------------------------------------------------------------------------- Errors

/** The file breaks a rule: `rule` is its id, `entry` the name of the entry at fault, or null. */
export class ArchiveError extends Error {
  constructor(rule, entry, expected, found) {
    super(`expected ${expected}, found ${found}`);
    this.name = 'ArchiveError';
    this.rule = rule;
    this.entry = entry;
  }
}

/** The file may conform, but exceeds a limit of this reader or of its caller. */
export class LimitError extends Error {
  constructor(message) {
    super(message);
    this.name = 'LimitError';
  }
}

function refuse(rule, entry, expected, found) {
  throw new ArchiveError(rule, entry, expected, found);
}

const hex = (number) => `0x${number.toString(16)}`;

const quote = (text) => JSON.stringify(text.length > 80 ? `${text.slice(0, 80)}...` : text);

// --------------------------------------------------------------------------------------------------------- Sources

/** A source that reads a Blob or File. */
export function blobSource(blob) {
  return {
    size: blob.size,
    async read(offset, length) {
      return new Uint8Array(await blob.slice(offset, offset + length).arrayBuffer());
    },
  };
}

/**
 * A source that reads a URL by range requests. The server has to honour ranges, and to serve the same file each time:
 * every answer must repeat the size, the ETag and the Last-Modified of the first answer. Across origins the server must
 * also expose `Content-Range`, and should expose `ETag`.
 */
export async function httpSource(url) {
  const first = await fetchRange(url, 0, 1);
  return {
    size: first.size,
    async read(offset, length) {
      if (length === 0) return new Uint8Array(0);
      const { version, body } = await fetchRange(url, offset, length);
      if (version !== first.version) throw new Error(`${url} has changed while it was read`);
      return body;
    },
  };
}

async function fetchRange(url, offset, length) {
  const last = offset + length - 1;
  const response = await fetch(url, { headers: { Range: `bytes=${offset}-${last}` }, cache: 'no-store' });
  const header = (name) => response.headers.get(name);
  const abandon = async (why) => {
    await response.body?.cancel();
    throw new Error(`${url}: ${why}`);
  };

  const version = (size) => [size, header('ETag'), header('Last-Modified')].join('\n');
  if (response.status === 416 && offset === 0 && header('Content-Range') === 'bytes */0') {
    await response.body?.cancel();
    return { size: 0, version: version(0), body: new Uint8Array(0) };
  }
  if (response.status === 200) await abandon('the server ignores ranges');
  if (response.status !== 206) await abandon(`HTTP status ${response.status}`);
  if ((header('Content-Encoding') ?? 'identity') !== 'identity') await abandon('the server encodes the content');

  const range = /^bytes (\d+)-(\d+)\/(\d+)$/.exec(header('Content-Range') ?? '');
  if (range === null) await abandon('the server names no range, or does not expose Content-Range');
  const [start, end, size] = range.slice(1).map(Number);
  if (start !== offset || end !== last) await abandon(`asked for bytes ${offset} to ${last}, got ${start} to ${end}`);

  const body = new Uint8Array(length);
  let filled = 0;
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    if (filled + value.length > length) {
      await reader.cancel();
      throw new Error(`${url}: more than the ${length} bytes asked for`);
    }
    body.set(value, filled);
    filled += value.length;
  }
  if (filled !== length) throw new Error(`${url}: ${filled} of ${length} bytes`);
  return { size, version: version(size), body };
}

async function readExactly(source, offset, length) {
  const bytes = await source.read(offset, length);
  if (bytes.length !== length) {
    throw new Error(`the source gave ${bytes.length} of ${length} bytes at offset ${offset}`);
  }
  return bytes;
}

/** Reads ahead in large pieces, so that many small entries take few reads. */
class ReadAhead {
  #source;
  #start = 0;
  #bytes = new Uint8Array(0);

  constructor(source) {
    this.#source = source;
  }

  /** Exactly the bytes from `offset` to `end`. */
  async all(offset, end) {
    if (!this.#holds(offset, end)) await this.#fill(offset, end - offset);
    return this.#bytes.subarray(offset - this.#start, end - this.#start);
  }

  /** Bytes from `offset` on, at most to `end`: as many as are in memory, at least one. */
  async some(offset, end) {
    if (!this.#holds(offset, offset + 1)) await this.#fill(offset, 1);
    return this.#bytes.subarray(offset - this.#start, end - this.#start);
  }

  #holds(offset, end) {
    return offset >= this.#start && end <= this.#start + this.#bytes.length;
  }

  async #fill(offset, atLeast) {
    const length = Math.min(Math.max(atLeast, PIECE), this.#source.size - offset);
    this.#bytes = await readExactly(this.#source, offset, length);
    this.#start = offset;
  }
}

// ------------------------------------------------------------------------------------------------------- Checksums

// CRC_TABLES[256 * k + byte] is what `byte` contributes to the CRC-32 if k bytes follow the byte.
const CRC_TABLES = (() => {
  const tables = new Int32Array(16 * 256);
  for (let i = 0; i < 256; i++) {
    let crc = i;
    for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0xedb88320 : crc >>> 1;
    tables[i] = crc;
  }
  for (let i = 256; i < tables.length; i++) {
    const crc = tables[i - 256];
    tables[i] = (crc >>> 8) ^ tables[crc & 0xff];
  }
  return tables;
})();

/** Continues the CRC-32 `crc` of the preceding bytes with `bytes`. Takes 16 bytes a step. */
export function crc32(bytes, crc = 0) {
  const t = CRC_TABLES;
  const view = viewOf(bytes);
  const length = bytes.length;
  let pos = 0;
  crc = ~crc;
  for (const end = length - 15; pos < end; pos += 16) {
    const a = view.getInt32(pos, true) ^ crc;
    const b = view.getInt32(pos + 4, true);
    const c = view.getInt32(pos + 8, true);
    const d = view.getInt32(pos + 12, true);
    crc =
      t[0xf00 + (a & 0xff)] ^ t[0xe00 + ((a >>> 8) & 0xff)] ^ t[0xd00 + ((a >>> 16) & 0xff)] ^ t[0xc00 + (a >>> 24)] ^
      t[0xb00 + (b & 0xff)] ^ t[0xa00 + ((b >>> 8) & 0xff)] ^ t[0x900 + ((b >>> 16) & 0xff)] ^ t[0x800 + (b >>> 24)] ^
      t[0x700 + (c & 0xff)] ^ t[0x600 + ((c >>> 8) & 0xff)] ^ t[0x500 + ((c >>> 16) & 0xff)] ^ t[0x400 + (c >>> 24)] ^
      t[0x300 + (d & 0xff)] ^ t[0x200 + ((d >>> 8) & 0xff)] ^ t[0x100 + ((d >>> 16) & 0xff)] ^ t[d >>> 24];
  }
  for (; pos < length; pos++) crc = (crc >>> 8) ^ t[(crc ^ bytes[pos]) & 0xff];
  return ~crc >>> 0;
}

/** SHA-1 of bytes that come in pieces. */
export class Sha1 {
  #state = new Int32Array([0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0]);
  #words = new Int32Array(80);
  #block = new Uint8Array(64); // the bytes of an incomplete block
  #length = 0;

  update(bytes) {
    const waiting = this.#length % 64;
    this.#length += bytes.length;
    let pos = 0;
    if (waiting > 0) {
      pos = Math.min(64 - waiting, bytes.length);
      this.#block.set(bytes.subarray(0, pos), waiting);
      if (waiting + pos < 64) return this;
      this.#compress(viewOf(this.#block), 0);
    }
    const view = viewOf(bytes);
    for (; pos + 64 <= bytes.length; pos += 64) this.#compress(view, pos);
    this.#block.set(bytes.subarray(pos));
    return this;
  }

  /** Ends the message and returns its SHA-1 in hexadecimal digits. */
  digest() {
    const bits = BigInt(this.#length) * 8n;
    // 0x80, then zeros, then the length in the last 8 bytes of a block
    const tail = new Uint8Array(((119 - (this.#length % 64)) % 64) + 9);
    tail[0] = 0x80;
    viewOf(tail).setBigUint64(tail.length - 8, bits);
    this.update(tail);
    return Array.from(this.#state, (word) => (word >>> 0).toString(16).padStart(8, '0')).join('');
  }

  #compress(view, pos) {
    const w = this.#words;
    for (let i = 0; i < 16; i++) w[i] = view.getInt32(pos + 4 * i);
    for (let i = 16; i < 80; i++) {
      const x = w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16];
      w[i] = (x << 1) | (x >>> 31);
    }
    const state = this.#state;
    let a = state[0];
    let b = state[1];
    let c = state[2];
    let d = state[3];
    let e = state[4];
    for (let i = 0; i < 80; i++) {
      let f; // of b, c and d, plus the constant
      if (i < 20) f = (d ^ (b & (c ^ d))) + 0x5a827999;
      else if (i < 40) f = (b ^ c ^ d) + 0x6ed9eba1;
      else if (i < 60) f = ((b & c) | (d & (b | c))) - 0x70e44324;
      else f = (b ^ c ^ d) - 0x359d3e2a;
      const next = (((a << 5) | (a >>> 27)) + (f | 0) + e + w[i]) | 0;
      e = d;
      d = c;
      c = (b << 30) | (b >>> 2);
      b = a;
      a = next;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
  }
}

// ----------------------------------------------------------------------------------------------------- End records

const END_RECORD = 22;
const ZIP64_LOCATOR = 20;
const ZIP64_END_RECORD = 56;
const ALL_END_RECORDS = ZIP64_END_RECORD + ZIP64_LOCATOR + END_RECORD;
const TAIL = 65535 + ALL_END_RECORDS; // last bytes of the file, which hold no false end record

const SIGNATURE = { local: 0x04034b50, record: 0x02014b50, end: 0x06054b50, zip64End: 0x06064b50, locator: 0x07064b50 };

function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

const u16 = (view, at) => view.getUint16(at, true);
const u32 = (view, at) => view.getUint32(at, true);
const u64 = (view, at) => Number(view.getBigUint64(at, true));

/**
 * Reads and checks the end records; returns { count, size, offset, tail }. The directory has `count` records and `size`
 * bytes, and begins at `offset`; `tail` is a view of the last bytes of the file.
 */
async function readEndRecords(source) {
  if (source.size < END_RECORD) refuse('ZIP-2', null, 'an end record of 22 bytes', `a file of ${source.size}`);
  const tailSize = Math.min(source.size, TAIL);
  const tail = viewOf(await readExactly(source, source.size - tailSize, tailSize));
  const end = tailSize - END_RECORD;
  if (u32(tail, end) !== SIGNATURE.end || u16(tail, end + 20) !== 0) {
    refuse('ZIP-2', null, 'an end record without comment as the last 22 bytes', 'other bytes');
  }
  for (const [at, what] of [[4, 'this disk'], [6, 'the disk of the directory']]) {
    const disk = u16(tail, end + at);
    if (disk !== 0) refuse('ZIP-3', null, `0 as the number of ${what}`, disk);
  }

  let [diskCount, count, size, offset] = [u16(tail, end + 8), u16(tail, end + 10), u32(tail, end + 12),
    u32(tail, end + 16)];
  const saturated = [diskCount === SATURATED16, count === SATURATED16, size === SATURATED32, offset === SATURATED32];
  const isZip64 = saturated.includes(true);
  const directoryEnd = source.size - (isZip64 ? ALL_END_RECORDS : END_RECORD);
  const hasLocator = end >= ZIP64_LOCATOR && u32(tail, end - ZIP64_LOCATOR) === SIGNATURE.locator;
  if (isZip64) {
    if (saturated.includes(false)) {
      refuse('ZIP64-1', null, 'all or none of the counts, the size and the offset saturated', 'some of them');
    }
    if (!hasLocator || tailSize < ALL_END_RECORDS) {
      const expected = 'Zip64 end record and locator before an end record with saturated values';
      refuse('ZIP64-1', null, expected, 'not both');
    }
    ({ diskCount, count, size, offset } = readZip64EndRecords(tail, source.size));
    if (count < SATURATED16 && size < SATURATED32 && offset < SATURATED32) {
      refuse('ZIP64-1', null, 'no Zip64 end record where all values fit', `${count}, ${size} and ${offset}`);
    }
  } else if (hasLocator) {
    refuse('ZIP64-1', null, 'no Zip64 locator where no value is saturated', 'its signature');
  }

  if (diskCount !== count) refuse('ZIP-4', null, 'equal counts in the end record', `${diskCount} and ${count}`);
  if (offset + size !== directoryEnd) {
    refuse('ZIP-5', null, `a directory that ends at ${directoryEnd}`, `${size} bytes at ${offset}`);
  }
  if (count > MAX_ENTRIES) refuse('ZIP-4', null, `at most ${MAX_ENTRIES} records`, count);
  const [least, most] = [count * RECORD, count * (RECORD + MAX_NAME + 28)];
  if (size < least || size > most) refuse('ZIP-4', null, `${least} to ${most} bytes of ${count} records`, size);
  if (count === 0) refuse('MODEL-1', null, `${MODEL_NAME} as the last entry`, 'no entries');
  return { count, size, offset, tail };
}

function readZip64EndRecords(tail, fileSize) {
  const record = tail.byteLength - ALL_END_RECORDS;
  const locator = record + ZIP64_END_RECORD;
  const expected = fileSize - ALL_END_RECORDS;
  if (u64(tail, locator + 8) !== expected) {
    refuse('ZIP64-3', null, `${expected} as the offset of the Zip64 end record`, u64(tail, locator + 8));
  }
  if (u32(tail, record) !== SIGNATURE.zip64End) {
    refuse('ZIP64-3', null, 'a Zip64 end record directly before its locator', 'none');
  }
  const [rest, version] = [u64(tail, record + 4), u16(tail, record + 14)];
  if (rest !== 44) refuse('ZIP64-2', null, '44 as the size in the Zip64 end record', rest);
  if (version !== 45) refuse('ZIP64-2', null, 'version needed 45 in the Zip64 end record', version);

  const disks = [
    [locator + 4, 0, 'the disk of the Zip64 end record'],
    [locator + 16, 1, 'the number of disks'],
    [record + 16, 0, 'the number of this disk in the Zip64 end record'],
    [record + 20, 0, 'the disk of the directory in the Zip64 end record'],
  ];
  for (const [at, wanted, what] of disks) {
    if (u32(tail, at) !== wanted) refuse('ZIP-3', null, `${wanted} as ${what}`, u32(tail, at));
  }
  return {
    diskCount: u64(tail, record + 24),
    count: u64(tail, record + 32),
    size: u64(tail, record + 40),
    offset: u64(tail, record + 48),
  };
}

/** Checks ZIP-16 in the last bytes, the last header offset and the offset of the directory. */
function checkFalseEnds({ offset, size, tail }, fileSize, lastHeaderOffset) {
  const start = fileSize - tail.byteLength;
  const end = offset + size - start; // of the directory; at least 22 bytes before that of the file
  for (let at = 0; at < end; at++) {
    const what = tail.getUint8(at) === 0x50 ? readsAs(tail, at) : null;
    if (what !== null) refuse('ZIP-16', null, 'no false record of the end', `${what} at ${start + at}`);
  }
  for (const [what, number] of [['header offset of the last entry', lastHeaderOffset], ['directory offset', offset]]) {
    if (holdsSignature(number)) refuse('ZIP-16', null, `a ${what} without a signature in it`, hex(number));
  }
}

/** The kind of the false record at offset `at` of the tail, or null. */
function readsAs(tail, at) {
  switch (u32(tail, at)) {
    case SIGNATURE.end: {
      const isOne = u32(tail, at + 4) === 0 && u16(tail, at + 8) === u16(tail, at + 10);
      return isOne ? 'an end record' : null;
    }
    case SIGNATURE.locator:
      if (at + 24 <= tail.byteLength && u32(tail, at + 20) === SIGNATURE.end) return 'an end record after a locator';
      return u32(tail, at + 4) === 0 && u32(tail, at + 16) === 1 ? 'a Zip64 locator' : null;
    case SIGNATURE.zip64End:
      return u64(tail, at + 4) === 44 ? 'a Zip64 end record' : null;
    default:
      return null;
  }
}

/**
 * True if an offset contains a signature of ZIP-16. The offset is taken as 4 bytes, or as 8 bytes if it does not fit 32
 * bits.
 */
function holdsSignature(offset) {
  const view = new DataView(new ArrayBuffer(8));
  view.setBigUint64(0, BigInt(offset), true);
  const places = offset < SATURATED32 ? [0] : [0, 1, 2, 3, 4];
  return places.some((at) => [SIGNATURE.end, SIGNATURE.zip64End, SIGNATURE.locator].includes(u32(view, at)));
}

// ------------------------------------------------------------------------------------------------------- Directory

const RECORD = 46; // a directory record without name and extra fields
const ZIP64_FIELD = 0x0001;

/** An entry as the directory describes it. */
class Entry {
  constructor(name, nameSize, headerOffset, size, crc, record) {
    this.name = name;
    this.nameSize = nameSize; // in bytes
    this.headerOffset = headerOffset;
    this.dataOffset = 0; // known once the next header offset is
    this.size = size;
    this.crc32 = crc;
    this.record = record; // offset of its record in the directory
  }

  get end() {
    return this.dataOffset + this.size;
  }

  get isModel() {
    return this.name === MODEL_NAME || this.name.startsWith(FURTHER_MODEL);
  }

  get isKey() {
    return !this.isModel && !this.name.startsWith(ASSETS);
  }
}

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });
const anyText = new TextDecoder('utf-8', { ignoreBOM: true });

/** The start of `bytes` as text for a message: at most 80 characters. */
const show = (bytes) => quote(anyText.decode(bytes.subarray(0, 81)));

/** Parses and checks the bytes of the directory; returns all entries in order. */
function parseDirectory(directory, { count, offset }) {
  const view = viewOf(directory);
  const entries = [];
  let pos = 0;
  for (let i = 0; i < count; i++) {
    if (pos + RECORD > directory.length || u32(view, pos) !== SIGNATURE.record) {
      refuse('ZIP-4', null, `${count} directory records`, `no record after ${i}`);
    }
    const entry = parseRecord(directory, view, pos, i);
    entries.push(entry);
    pos += RECORD + u16(view, pos + 28) + u16(view, pos + 30);
  }
  if (pos !== directory.length) {
    refuse('ZIP-4', null, `records that fill the ${directory.length} bytes of the directory`, `${pos} bytes of them`);
  }
  checkNames(entries, directory);
  checkModels(entries);
  layOut(entries, offset);
  return entries;
}

function parseRecord(directory, view, pos, index) {
  const nameEnd = pos + RECORD + u16(view, pos + 28);
  const extraEnd = nameEnd + u16(view, pos + 30);
  const nameBytes = directory.subarray(pos + RECORD, nameEnd);
  if (extraEnd > directory.length) {
    refuse('ZIP-4', null, `record ${index} to end within the directory`, `${extraEnd - pos} bytes`);
  }
  const name = checkName(nameBytes);
  const disk = u16(view, pos + 34);
  if (disk !== 0) refuse('ZIP-3', name, 'disk number 0', disk);

  const flags = u16(view, pos + 8);
  const isAscii = name.length === nameBytes.length; // every other character takes more bytes than units of UTF-16
  const expectedFlags = isAscii ? 0 : 0x0800;
  if (flags !== expectedFlags) refuse('ZIP-9', name, `flags ${hex(expectedFlags)}`, hex(flags));
  const method = u16(view, pos + 10);
  if (method !== 0) refuse('ZIP-8', name, 'method 0', method);
  const [compressed, size32] = [u32(view, pos + 20), u32(view, pos + 24)];
  if (compressed !== size32) refuse('ZIP-8', name, 'equal sizes', `compressed ${compressed}, uncompressed ${size32}`);
  const version = u16(view, pos + 6);
  if (![10, 20, 45].includes(version)) refuse('ZIP-10', name, 'version needed 10, 20 or 45', version);

  const host = view.getUint8(pos + 5);
  if (host !== 3) refuse('ZIP-11', name, 'a version made by Unix (3)', host);
  const external = u32(view, pos + 38);
  const unixType = external >>> 28;
  if ((unixType !== 0 && unixType !== 8) || (external & 0x0e00ffd8) !== 0) {
    refuse('ZIP-11', name, 'the attributes of a regular file', hex(external));
  }
  const internal = u16(view, pos + 36);
  if (internal !== 0) refuse('ZIP-11', name, 'internal attributes 0', hex(internal));
  const commentSize = u16(view, pos + 32);
  if (commentSize !== 0) refuse('ZIP-12', name, 'no comment', `one of ${commentSize} bytes`);

  const { size, headerOffset } = readSizes(view, pos, nameEnd, extraEnd, name);
  if (extraEnd > nameEnd && version !== 45) refuse('ZIP-10', name, 'version needed 45 with a Zip64 field', version);
  return new Entry(name, nameBytes.length, headerOffset, size, u32(view, pos + 16), pos);
}

/** Size and header offset of an entry. Values that are saturated in the record are read from its Zip64 field. */
function readSizes(view, pos, extra, extraEnd, name) {
  let [size, headerOffset] = [u32(view, pos + 24), u32(view, pos + 42)];
  const [wideSize, wideOffset] = [size === SATURATED32, headerOffset === SATURATED32];
  const extraSize = extraEnd - extra;
  if (!wideSize && !wideOffset) {
    if (extraSize !== 0) refuse('ZIP-13', name, 'no extra field where nothing is saturated', `${extraSize} bytes`);
    return { size, headerOffset };
  }

  if (extraSize < 4 || u16(view, extra) !== ZIP64_FIELD || u16(view, extra + 2) !== extraSize - 4) {
    refuse('ZIP-13', name, 'one Zip64 field and no other', `${extraSize} bytes of extra fields`);
  }
  const expected = (wideSize ? 16 : 0) + (wideOffset ? 8 : 0);
  if (extraSize - 4 !== expected) refuse('ZIP64-4', name, `a Zip64 field of ${expected} bytes`, extraSize - 4);
  if (wideSize) {
    size = u64(view, extra + 4);
    const compressed = u64(view, extra + 12);
    if (compressed !== size) refuse('ZIP-8', name, 'equal Zip64 sizes', `${size} and ${compressed}`);
    if (size < SATURATED32) refuse('ZIP64-4', name, 'a size in the Zip64 field that needs it', size);
  }
  if (wideOffset) {
    headerOffset = u64(view, extraEnd - 8);
    if (headerOffset < SATURATED32) {
      refuse('ZIP64-4', name, 'a header offset in the Zip64 field that needs it', headerOffset);
    }
  }
  return { size, headerOffset };
}

/** Computes the data offset of every entry, and checks that the entries lie side by side and aligned. */
function layOut(entries, directoryOffset) {
  if (entries[0].headerOffset !== 0) refuse('ZIP-1', entries[0].name, 'header offset 0', entries[0].headerOffset);
  entries.forEach((entry, i) => {
    const next = i + 1 < entries.length ? entries[i + 1].headerOffset : directoryOffset;
    const space = next - entry.size - entry.headerOffset;
    const least = localHeaderSize(entry);
    if (!(space >= least && space <= least + MAX_PADDING)) {
      refuse('ZIP-6', entry.name, `${least} to ${least + MAX_PADDING} bytes for the local header`, space);
    }
    entry.dataOffset = next - entry.size;
    if (entry.dataOffset % ALIGNMENT !== 0) {
      refuse('ALIGN-1', entry.name, `a data offset that is a multiple of ${ALIGNMENT}`, entry.dataOffset);
    }
  });
}

// --------------------------------------------------------------------------------------------------- Local headers

const LOCAL_HEADER = 30; // without name and extra fields
const ALIGNMENT_FIELD = 0xd935;

/** The size of a local header without padding. */
function localHeaderSize(entry) {
  return LOCAL_HEADER + entry.nameSize + (entry.size < SATURATED32 ? 0 : 20) + 6;
}

// Each field of fixed size that ZIP-7 compares, as [label, offset in the local header, size]. The offset in the
// directory record is larger by 2.
const COMMON_FIELDS = [
  ['version needed', 4, 2],
  ['flags', 6, 2],
  ['method', 8, 2],
  ['modification time', 10, 2],
  ['modification date', 12, 2],
  ['CRC-32', 14, 4],
  ['compressed size', 18, 4],
  ['uncompressed size', 22, 4],
  ['name length', 26, 2],
];

/** Checks the rules of the stage "header"; `header` is the bytes from the header offset to the data offset. */
function checkLocalHeader(entry, header, directory) {
  const view = viewOf(header);
  const record = viewOf(directory);
  const { name, record: recordPos } = entry;
  if (u32(view, 0) !== SIGNATURE.local) {
    refuse('ZIP-7', name, `a local header at ${entry.headerOffset}`, `the signature ${hex(u32(view, 0))}`);
  }
  for (const [what, at, size] of COMMON_FIELDS) {
    const read = size === 2 ? u16 : u32;
    const [expected, found] = [read(record, recordPos + at + 2), read(view, at)];
    if (expected !== found) refuse('ZIP-7', name, `${what} ${expected} in the local header`, found);
  }
  const nameLength = u16(view, 26);
  for (let i = 0; i < nameLength; i++) {
    if (header[LOCAL_HEADER + i] !== directory[recordPos + RECORD + i]) {
      const found = show(header.subarray(LOCAL_HEADER, LOCAL_HEADER + nameLength));
      refuse('ZIP-7', name, `the name ${quote(name)} in the local header`, found);
    }
  }
  const extra = LOCAL_HEADER + nameLength;
  const end = extra + u16(view, 28);
  if (end !== header.length) refuse('ZIP-7', name, `a local header of ${header.length} bytes`, end);
  checkLocalExtra(entry, header, extra);
}

function checkLocalExtra(entry, header, extra) {
  const view = viewOf(header);
  const { name } = entry;
  let pos = extra;
  if (entry.size >= SATURATED32) {
    if (u16(view, pos) !== ZIP64_FIELD) refuse('ZIP-14', name, 'a Zip64 field first', `the id ${hex(u16(view, pos))}`);
    if (u16(view, pos + 2) !== 16) refuse('ZIP64-5', name, 'a Zip64 field of 16 bytes', u16(view, pos + 2));
    for (const at of [pos + 4, pos + 12]) {
      if (u64(view, at) !== entry.size) refuse('ZIP64-5', name, `the Zip64 size ${entry.size}`, u64(view, at));
    }
    pos += 20;
  }
  if (u16(view, pos) !== ALIGNMENT_FIELD) {
    refuse('ZIP-14', name, 'the alignment field', `an extra field with the id ${hex(u16(view, pos))}`);
  }
  const size = u16(view, pos + 2);
  if (size !== header.length - pos - 4) {
    refuse('ZIP-14', name, `an alignment field of ${header.length - pos - 4} bytes, to the data`, size);
  }

  const alignment = u16(view, pos + 4);
  if (alignment < ALIGNMENT || alignment > MAX_ALIGNMENT || (alignment & (alignment - 1)) !== 0) {
    refuse('ALIGN-2', name, `an alignment that is a power of two from ${ALIGNMENT} to ${MAX_ALIGNMENT}`, alignment);
  }
  if (entry.dataOffset % alignment !== 0) {
    refuse('ALIGN-2', name, `data at a multiple of ${alignment}`, entry.dataOffset);
  }
  const past = (entry.headerOffset + localHeaderSize(entry)) % alignment;
  const padding = past === 0 ? 0 : alignment - past;
  if (size - 2 !== padding) refuse('ALIGN-3', name, `${padding} bytes of padding`, size - 2);
  for (let i = pos + 6; i < header.length; i++) {
    if (header[i] !== 0) refuse('ALIGN-3', name, 'padding of zero bytes', `${hex(header[i])} at byte ${i}`);
  }
}

// ----------------------------------------------------------------------------------------------------------- Names

/** Checks one name without regard to the other names; returns the name as text. */
function checkName(bytes) {
  let name;
  try {
    name = utf8.decode(bytes);
  } catch {
    return refuse('NAME-1', anyText.decode(bytes), 'a name in UTF-8', show(bytes));
  }
  if (name === MODEL_NAME) return name;
  if (name.startsWith(FURTHER_MODEL)) {
    const id = name.slice(FURTHER_MODEL.length);
    if (!/^[a-z][a-z0-9_]*$/.test(id) || id.length > 64) refuse('MODEL-4', name, 'the id of a model', quote(id));
  } else if (name.startsWith('__')) {
    refuse('VERSION-1', name, 'no entry of a later version of the format', quote(name));
  } else if (name.startsWith(ASSETS)) {
    checkAsset(name, bytes);
  } else if (!/^[A-Za-z_][A-Za-z0-9_]*$/.test(name) || name.length > 255 || name.toLowerCase() === 'assets') {
    refuse('KEY-1', name, 'a key', quote(name));
  }
  return name;
}

function checkAsset(name, bytes) {
  if (bytes.length > MAX_NAME) refuse('ASSET-1', name, `a name of at most ${MAX_NAME} bytes`, bytes.length);
  if (/[\\:;\u0000-\u001f\u007f-\u009f]/.test(name)) {
    refuse('ASSET-1', name, 'a name without backslash, colon, semicolon and control characters', quote(name));
  }
  if (/\p{Cn}/u.test(name)) refuse('ASSET-1', name, 'assigned code points', quote(name));
  if (name !== name.normalize('NFC')) refuse('ASSET-1', name, 'Normalization Form C', quote(name));
  if (/\/\.\.?(\/|$)/.test(name)) refuse('ASSET-1', name, 'components other than . and ..', quote(name));
  for (let start = ASSETS.length; start <= bytes.length; ) {
    const slash = bytes.indexOf(SLASH, start);
    const end = slash === -1 ? bytes.length : slash;
    if (end === start || end - start > 255) refuse('ASSET-1', name, 'components of 1 to 255 bytes', end - start);
    start = end + 1;
  }
}

const SLASH = 0x2f;

// The byte to compare for each byte of a name: lower case for A to Z, 0 for the slash, otherwise the byte itself.
const FOLDED = Uint8Array.from({ length: 256 }, (_, byte) => {
  if (byte === SLASH) return 0;
  return byte >= 0x41 && byte <= 0x5a ? byte + 0x20 : byte;
});

/**
 * NAME-2. In sorted order, equal names are neighbours. The slash sorts first, so a folder and the first name in it are
 * neighbours, too.
 */
function checkNames(entries, directory) {
  const scratch = new Uint8Array(MAX_NAME);
  const names = entries.map(({ record, nameSize }) => {
    for (let i = 0; i < nameSize; i++) scratch[i] = FOLDED[directory[record + RECORD + i]];
    return utf8.decode(scratch.subarray(0, nameSize));
  });
  names.sort();
  for (let i = 1; i < names.length; i++) {
    const [before, name] = [names[i - 1], names[i]];
    if (name.startsWith(before) && (name.length === before.length || name[before.length] === '\0')) {
      const readable = name.replaceAll('\0', '/');
      const what = name.length === before.length ? 'twice' : `and the folder ${quote(before.replaceAll('\0', '/'))}`;
      const expected = 'names that differ in more than case, none of them a folder of another';
      refuse('NAME-2', readable, expected, `${quote(readable)} ${what}`);
    }
  }
}

/** Checks positions and sizes of the models. */
function checkModels(entries) {
  const last = entries.at(-1).name;
  if (last !== MODEL_NAME) refuse('MODEL-1', last, `${MODEL_NAME} as the last entry`, quote(last));
  const models = entries.filter((entry) => entry.isModel);
  const further = models.slice(0, -1).map(({ name }) => name).sort();
  further.forEach((expected, i) => {
    const { name } = entries[entries.length - models.length + i];
    if (name !== expected) refuse('MODEL-4', name, `${expected} in this place before ${MODEL_NAME}`, quote(name));
  });
  for (const { name, size } of models) {
    if (size >= MODEL_END) refuse('MODEL-2', name, 'a model of less than 2 GiB', size);
  }
}

// ------------------------------------------------------------------------------------------------------ The models

// The messages of onnx.proto that a ModelProto can contain: type, * where repeated, name, number of each field. What
// is not listed is unknown. `varint` stands for the integers and enumerations, `bytes` also for strings.
const SCHEMA = compileSchema(`
  ModelProto: varint ir_version 1, bytes producer_name 2, bytes producer_version 3, bytes domain 4,
    varint model_version 5, bytes doc_string 6, GraphProto graph 7, OperatorSetIdProto* opset_import 8,
    StringStringEntryProto* metadata_props 14, TrainingInfoProto* training_info 20, FunctionProto* functions 25,
    DeviceConfigurationProto* configuration 26
  GraphProto: NodeProto* node 1, bytes name 2, TensorProto* initializer 5, bytes doc_string 10,
    ValueInfoProto* input 11, ValueInfoProto* output 12, ValueInfoProto* value_info 13,
    TensorAnnotation* quantization_annotation 14, SparseTensorProto* sparse_initializer 15,
    StringStringEntryProto* metadata_props 16
  NodeProto: bytes* input 1, bytes* output 2, bytes name 3, bytes op_type 4, AttributeProto* attribute 5,
    bytes doc_string 6, bytes domain 7, bytes overload 8, StringStringEntryProto* metadata_props 9,
    NodeDeviceConfigurationProto* device_configurations 10
  AttributeProto: bytes name 1, fixed32 f 2, varint i 3, bytes s 4, TensorProto t 5, GraphProto g 6,
    fixed32* floats 7, varint* ints 8, bytes* strings 9, TensorProto* tensors 10, GraphProto* graphs 11,
    bytes doc_string 13, TypeProto tp 14, TypeProto* type_protos 15, varint type 20, bytes ref_attr_name 21,
    SparseTensorProto sparse_tensor 22, SparseTensorProto* sparse_tensors 23
  TensorProto: varint* dims 1, varint data_type 2, Segment segment 3, fixed32* float_data 4, varint* int32_data 5,
    bytes* string_data 6, varint* int64_data 7, bytes name 8, bytes raw_data 9, fixed64* double_data 10,
    varint* uint64_data 11, bytes doc_string 12, StringStringEntryProto* external_data 13, varint data_location 14,
    StringStringEntryProto* metadata_props 16
  Segment: varint begin 1, varint end 2
  SparseTensorProto: TensorProto values 1, TensorProto indices 2, varint* dims 3
  FunctionProto: bytes name 1, bytes* input 4, bytes* output 5, bytes* attribute 6, NodeProto* node 7,
    bytes doc_string 8, OperatorSetIdProto* opset_import 9, bytes domain 10, AttributeProto* attribute_proto 11,
    ValueInfoProto* value_info 12, bytes overload 13, StringStringEntryProto* metadata_props 14
  TrainingInfoProto: GraphProto initialization 1, GraphProto algorithm 2,
    StringStringEntryProto* initialization_binding 3, StringStringEntryProto* update_binding 4
  ValueInfoProto: bytes name 1, TypeProto type 2, bytes doc_string 3, StringStringEntryProto* metadata_props 4
  TypeProto: TensorType tensor_type 1, Sequence sequence_type 4, Map map_type 5, bytes denotation 6,
    Opaque opaque_type 7, TensorType sparse_tensor_type 8, Optional optional_type 9
  TensorType: varint elem_type 1, TensorShapeProto shape 2
  Sequence: TypeProto elem_type 1
  Map: varint key_type 1, TypeProto value_type 2
  Optional: TypeProto elem_type 1
  Opaque: bytes domain 1, bytes name 2
  TensorShapeProto: Dimension* dim 1
  Dimension: varint dim_value 1, bytes dim_param 2, bytes denotation 3
  TensorAnnotation: bytes tensor_name 1, StringStringEntryProto* quant_parameter_tensor_names 2
  OperatorSetIdProto: bytes domain 1, varint version 2
  StringStringEntryProto: bytes key 1, bytes value 2
  DeviceConfigurationProto: bytes name 1, varint num_devices 2, bytes* device 3
  NodeDeviceConfigurationProto: bytes configuration_id 1, ShardingSpecProto* sharding_spec 2, varint pipeline_stage 3
  ShardingSpecProto: bytes tensor_name 1, varint* device 2, IntIntListEntryProto* index_to_device_group_map 3,
    ShardedDimProto* sharded_dim 4
  IntIntListEntryProto: varint key 1, varint* value 2
  ShardedDimProto: varint axis 1, SimpleShardedDimProto* simple_sharding 2
  SimpleShardedDimProto: varint dim_value 1, bytes dim_param 2, varint num_shards 3
`);

/**
 * Messages by name, each an array of fields by number: { name, wire, repeated, message }. `wire` is
 * the wire type of one element that is not packed.
 */
function compileSchema(text) {
  const wires = { varint: 0, fixed64: 1, bytes: 2, fixed32: 5 };
  const messages = new Map();
  for (const [, name] of text.matchAll(/(\w+):/g)) messages.set(name, []);
  for (const [, owner, body] of text.matchAll(/(\w+):([^:]*?)(?=\w+:|\s*$)/g)) {
    for (const [, type, star, name, number] of body.matchAll(/(\w+)(\*?) (\w+) (\d+)/g)) {
      const message = messages.get(type) ?? null;
      messages.get(owner)[number] = { name, wire: wires[type] ?? 2, repeated: star === '*', message };
    }
  }
  return Object.fromEntries(messages);
}

const [VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32] = [0, 1, 2, 3, 4, 5];
const MAX_DEPTH = 100;
const MAX_MESSAGES = 4194304;
const MAX_DIMS = 64;
const EXTERNAL_KEYS = ['location', 'offset', 'length', 'checksum'];

// A Kept object holds the parts of a message that the reader needs. Most messages have null instead of a Kept object.
// `number` takes the low and the high 32 bits of a varint, or zeros for a number of fixed width. `string` takes the
// range of a string or of bytes in the model. `part` is called for each nested message, and returns the Kept object of
// the nested message, or null. All occurrences of a field that is not repeated have the same Kept object.

class KeptModel {
  hasVersion = false;
  graphs = 0;

  number(field) {
    if (field.name === 'ir_version') this.hasVersion = true;
  }

  string() {}

  part(field) {
    if (field.name === 'graph') this.graphs++;
    return null;
  }
}

/**
 * AttributeProto or SparseTensorProto. `parts` holds the messages of fields that are not repeated: further occurrences
 * are merged into these messages.
 */
class KeptHolder {
  parts = null;

  number() {}

  string() {}

  part(field) {
    if (field.repeated) return keepFor(field);
    const known = this.parts?.get(field.name);
    if (known !== undefined) return known;
    const kept = keepFor(field);
    if (kept !== null) (this.parts ??= new Map()).set(field.name, kept);
    return kept;
  }
}

class KeptPair {
  key = null;
  value = null;

  number() {}

  string(field, start, end) {
    this[field.name] = { start, end };
  }

  part() {
    return null;
  }
}

class KeptTensor {
  dims = []; // at most one more than a tensor may have
  dataType = 0;
  isExternal = false;
  name = null;
  inside = null; // the name of a field that holds data, or of `segment`
  pairs = null; // of external_data: the last value of each key, and how often it occurs
  otherPair = null; // the key of a pair that external tensors do not have

  number(field, low, high) {
    switch (field.name) {
      case 'dims':
        if (this.dims.length <= MAX_DIMS) this.dims.push(BigInt.asIntN(64, (BigInt(high) << 32n) | BigInt(low)));
        break;
      case 'data_type':
        this.dataType = low | 0;
        break;
      case 'data_location': // any other value counts as an unknown field
        if (low <= 1) this.isExternal = low === 1;
        break;
      default:
        this.inside = field.name;
    }
  }

  string(field, start, end) {
    if (field.name === 'name') this.name = { start, end };
    else if (field.name !== 'doc_string') this.inside = field.name;
  }

  part(field) {
    if (field.name === 'segment') this.inside = 'segment';
    return field.name === 'external_data' ? new KeptPair() : null;
  }

  add(pair, key) {
    this.pairs ??= new Map();
    if (!EXTERNAL_KEYS.includes(key)) this.otherPair ??= key;
    else this.pairs.set(key, { range: pair.value, count: (this.pairs.get(key)?.count ?? 0) + 1 });
  }
}

function keepFor(field) {
  switch (field.message) {
    case SCHEMA.TensorProto:
      return new KeptTensor();
    case SCHEMA.AttributeProto:
    case SCHEMA.SparseTensorProto:
      return new KeptHolder();
    default:
      return null;
  }
}

/**
 * Parses a serialized ModelProto. Keeps only tensors that are external or have `external_data`, at most `limit` of
 * them. `messages` counts the messages of all models parsed so far.
 */
class ModelParser {
  #name;
  #bytes;
  #pos = 0;
  #low = 0; // the varint read last
  #high = 0;
  #limit;
  messages;
  tensors = [];

  constructor(name, bytes, limit, messages) {
    this.#name = name;
    this.#bytes = bytes;
    this.#limit = limit;
    this.messages = messages;
  }

  parse() {
    const model = new KeptModel();
    this.#message(SCHEMA.ModelProto, this.#bytes.length, 0, model);
    if (!model.hasVersion) refuse('MODEL-3', this.#name, 'a ModelProto with ir_version', 'none');
    if (model.graphs !== 1) refuse('MODEL-3', this.#name, 'a ModelProto with one graph', model.graphs);
  }

  /** The text of a string; "" if there is none, null if it is longer than `most` bytes. */
  text(range, most) {
    if (range === null) return '';
    if (range.end - range.start > most) return null;
    return anyText.decode(this.#bytes.subarray(range.start, range.end));
  }

  #fail(expected, found) {
    refuse('MODEL-3', this.#name, `a serialized ModelProto with ${expected}`, `${found} before byte ${this.#pos}`);
  }

  #message(fields, end, depth, kept) {
    while (this.#pos < end) {
      const tag = this.#tag(end);
      const number = tag >>> 3;
      const wire = tag & 7;
      const field = number < fields.length ? fields[number] : undefined;
      if (field !== undefined && field.wire === wire) {
        switch (wire) {
          case VARINT:
            this.#varint(end);
            kept?.number(field, this.#low, this.#high);
            break;
          case LENGTH: {
            const stop = this.#length(end);
            if (field.message !== null) {
              this.#part(field, stop, depth + 1, kept);
            } else {
              kept?.string(field, this.#pos, stop);
              this.#pos = stop;
            }
            break;
          }
          default:
            this.#skip(wire === FIXED64 ? 8 : 4, end);
            kept?.number(field, 0, 0);
        }
      } else if (field !== undefined && wire === LENGTH && field.repeated) {
        this.#packed(field, this.#length(end), kept);
      } else {
        this.#unknown(number, wire, end, depth);
      }
    }
  }

  #part(field, end, depth, parent) {
    this.#enter(depth);
    if (++this.messages > MAX_MESSAGES) this.#fail(`at most ${MAX_MESSAGES} messages in all models`, 'one more');
    const kept = parent === null ? keepFor(field) : parent.part(field);
    this.#message(field.message, end, depth, kept);
    if (kept !== null && field.repeated) this.#complete(kept, parent);
  }

  /** Finishes a kept message: no further occurrence will be merged into it. */
  #complete(kept, parent) {
    if (kept instanceof KeptPair) {
      parent.add(kept, this.text(kept.key, 8) ?? 'a longer one');
    } else if (kept instanceof KeptTensor) {
      if ((kept.isExternal || kept.pairs !== null) && this.tensors.length < this.#limit) this.tensors.push(kept);
    } else if (kept.parts !== null) {
      for (const part of kept.parts.values()) this.#complete(part, kept);
    }
  }

  /** Reads the packed numbers of a repeated field. */
  #packed(field, end, kept) {
    if (field.wire === VARINT) {
      while (this.#pos < end) {
        this.#varint(end);
        kept?.number(field, this.#low, this.#high);
      }
      return;
    }
    const width = field.wire === FIXED64 ? 8 : 4;
    const length = end - this.#pos;
    if (length % width !== 0) this.#fail(`packed numbers of ${width} bytes`, `${length} bytes`);
    if (length > 0) kept?.number(field, 0, 0);
    this.#pos = end;
  }

  #unknown(number, wire, end, depth) {
    switch (wire) {
      case VARINT:
        this.#varint(end);
        break;
      case FIXED64:
        this.#skip(8, end);
        break;
      case LENGTH:
        this.#pos = this.#length(end);
        break;
      case GROUP:
        this.#group(number, end, depth + 1);
        break;
      case FIXED32:
        this.#skip(4, end);
        break;
      default:
        this.#fail('wire types from 0 to 5 and no end of a group without its begin', `wire type ${wire}`);
    }
  }

  #group(number, end, depth) {
    this.#enter(depth);
    for (;;) {
      if (this.#pos >= end) this.#fail(`an end of group ${number}`, 'none');
      const tag = this.#tag(end, 0);
      if ((tag & 7) !== END_GROUP) {
        this.#unknown(tag >>> 3, tag & 7, end, depth);
        continue;
      }
      if (tag >>> 3 !== number) this.#fail(`an end of group ${number}`, `one of ${tag >>> 3}`);
      return;
    }
  }

  #enter(depth) {
    if (depth > MAX_DEPTH) this.#fail(`messages nested at most ${MAX_DEPTH} deep`, 'one deeper');
  }

  #tag(end, least = 1) {
    let tag = this.#bytes[this.#pos];
    if (tag < 0x80) {
      this.#pos++; // within the message, whose end the caller has not reached
    } else {
      const start = this.#pos;
      this.#varint(end);
      if (this.#pos - start > 5) this.#fail('tags of at most 5 bytes', this.#pos - start);
      if (this.#high !== 0) this.#fail('field numbers below 2^29', 'a larger one');
      tag = this.#low;
    }
    if (tag >>> 3 < least) this.#fail(`field numbers from ${least}`, 0);
    return tag;
  }

  /** Reads a varint into #low and #high. Bits above the 64th are dropped. */
  #varint(end) {
    const bytes = this.#bytes;
    let pos = this.#pos;
    let low = 0;
    let high = 0;
    for (let i = 0; ; i++) {
      if (i === 10) this.#fail('varints of at most 10 bytes', 'a longer one');
      if (pos >= end) this.#fail('varints that end within their field', 'one that does not');
      const byte = bytes[pos++];
      const bits = byte & 0x7f;
      if (i < 5) low |= bits << (7 * i);
      if (i === 4) high = bits >>> 4;
      else if (i > 4) high |= bits << (7 * i - 32);
      if (byte < 0x80) break;
    }
    this.#pos = pos;
    this.#low = low >>> 0;
    this.#high = high >>> 0;
  }

  /** Reads the length of a field; returns the position at which the field ends. */
  #length(end) {
    const start = this.#pos;
    this.#varint(end);
    if (this.#pos - start > 5) this.#fail('lengths of at most 5 bytes', this.#pos - start);
    const length = this.#high * 2 ** 32 + this.#low;
    if (length > end - this.#pos) this.#fail(`at most ${end - this.#pos} bytes in a field`, length);
    return this.#pos + length;
  }

  #skip(length, end) {
    if (length > end - this.#pos) this.#fail(`a number of ${length} bytes`, `only ${end - this.#pos}`);
    this.#pos += length;
  }
}

// --------------------------------------------------------------------------------------------------------- Tensors

// Bits per element, keyed by the number of the data type. Unpacked, an element takes whole bytes.
const ELEMENT_BITS = new Map([
  [1, 32], [2, 8], [3, 8], [4, 16], [5, 16], [6, 32], [7, 64], [9, 8], [10, 16], [11, 64], [12, 32], [13, 64],
  [14, 64], [15, 128], [16, 16], [17, 8], [18, 8], [19, 8], [20, 8], [21, 4], [22, 4], [23, 4], [24, 8], [25, 2],
  [26, 2], [27, 6], [28, 6],
]);
const BOOL = 9;
const MAX_TENSOR_NAME = 1 << 28; // bytes, below what engines take as a string

const ceilBytes = (bits) => (bits + 7n) / 8n;

/**
 * Parses all models, given as { name, bytes }, compares their tensors with the keys, and returns the external tensors.
 */
function matchTensors(models, entries) {
  const keys = new Map(entries.filter((entry) => entry.isKey).map((entry) => [entry.name, entry]));
  let messages = 0;
  const parsers = models.map(({ name, bytes }) => {
    const parser = new ModelParser(name, bytes, keys.size + 1, messages);
    parser.parse();
    messages = parser.messages;
    return parser;
  });

  const tensors = [];
  const first = new Map(); // the first tensor at each key
  models.forEach(({ name }, i) => {
    const locations = new Set();
    for (const kept of parsers[i].tensors) {
      const tensor = { model: name.slice(FURTHER_MODEL.length), ...checkTensor(parsers[i], kept, keys) };
      const { key } = tensor;
      if (locations.has(key)) refuse('DATA-3', key, 'one tensor of a model at a location', 'two');
      locations.add(key);
      if (!first.has(key)) first.set(key, tensor);
      const [expected, found] = [first.get(key), tensor].map((it) => `type ${it.dataType}, dims [${it.dims}]`);
      if (expected !== found) refuse('DATA-8', key, `${expected} in all models`, found);
      tensors.push(tensor);
    }
  });
  for (const key of keys.keys()) {
    if (!first.has(key)) refuse('DATA-2', key, 'a tensor for every key', 'none');
  }
  return tensors;
}

function checkTensor(parser, { dims, dataType, isExternal, name: nameRange, inside, pairs, otherPair }, keys) {
  const name = parser.text(nameRange, MAX_TENSOR_NAME);
  if (name === null) throw new LimitError(`a tensor has a name of more than ${MAX_TENSOR_NAME} bytes`);
  const tensorName = `the tensor ${quote(name)}`;
  if (!isExternal) refuse('DATA-7', null, `no external_data in ${tensorName}, which is not EXTERNAL`, 'pairs');
  if (inside !== null) refuse('DATA-7', null, `no data in ${tensorName}, which is EXTERNAL`, inside);

  if (otherPair !== null) refuse('DATA-4', null, `no other pair in ${tensorName}`, quote(otherPair));
  for (const key of EXTERNAL_KEYS) {
    const count = pairs?.get(key)?.count ?? 0;
    if (count > 1 || (count === 0 && key === 'location')) {
      refuse('DATA-4', null, `${key} ${key === 'location' ? 'once' : 'at most once'} in ${tensorName}`, count);
    }
  }
  const pairText = (key, most) => (pairs.has(key) ? parser.text(pairs.get(key).range, most) ?? 'a longer one' : null);
  const key = pairText('location', 255);
  const entry = keys.get(key);
  if (entry === undefined) refuse('DATA-1', null, `a key as the location of ${tensorName}`, quote(key));
  const offset = pairText('offset', 20) ?? '0';
  if (offset !== '0') refuse('DATA-5', key, 'the offset 0', quote(offset));
  const length = pairText('length', 20) ?? `${entry.size}`;
  if (length !== `${entry.size}`) refuse('DATA-5', key, `the length ${entry.size}`, quote(length));

  const bits = ELEMENT_BITS.get(dataType);
  if (bits === undefined) refuse('TENSOR-1', key, 'a data type with elements of fixed width', dataType);
  const { count, size } = measure(dims, BigInt(bits), key);
  if (size !== BigInt(entry.size)) refuse('TENSOR-3', key, `${size} bytes of data`, entry.size);
  const unusedBits = Number(ceilBytes(count * BigInt(bits)) * 8n - count * BigInt(bits));
  return { key, name, dataType, dims, entry, unusedBits, checksum: pairText('checksum', 40) };
}

/** The number of elements, and the size of the data in bytes. */
function measure(dims, bits, key) {
  if (dims.length > MAX_DIMS) refuse('TENSOR-2', key, `at most ${MAX_DIMS} dims`, 'more');
  let count = 1n;
  let extent = ceilBytes(bits);
  for (const dim of dims) {
    if (dim < 0n) refuse('TENSOR-2', key, 'dims from 0 to 2^63 - 1', dim);
    count *= dim;
    if (dim !== 0n) extent *= dim;
  }
  if (extent >= 1n << 63n) refuse('TENSOR-2', key, 'dims that give less than 2^63 bytes', extent);
  return { count, size: ceilBytes(count * bits) };
}

/** The index of the first byte above 1, or -1. */
function findAboveOne(bytes) {
  const view = viewOf(bytes);
  let pos = 0;
  while (pos + 4 <= bytes.length && (view.getInt32(pos) & 0xfefefefe) === 0) pos += 4;
  while (pos < bytes.length && bytes[pos] <= 1) pos++;
  return pos < bytes.length ? pos : -1;
}

/** Checks the rules of the stage "data" for one entry, piece by piece. */
class DataCheck {
  #entry;
  #tensors;
  #names;
  #crc = 0;
  #sha1 = null;
  #lastByte = 0;

  /**
   * `tensors` are the tensors whose data the entry holds, all of one data type and shape; none to check only the CRC-32.
   * `names` are their names, for messages.
   */
  constructor(entry, tensors = [], names = tensors.map(({ name }) => name)) {
    this.#entry = entry;
    this.#tensors = tensors;
    this.#names = names;
    if (tensors.some(({ checksum }) => checksum !== null)) this.#sha1 = new Sha1();
  }

  update(piece) {
    this.#crc = crc32(piece, this.#crc);
    this.#sha1?.update(piece);
    this.#lastByte = piece[piece.length - 1];
    if (this.#tensors[0]?.dataType === BOOL) {
      const other = findAboveOne(piece);
      if (other !== -1) refuse('TENSOR-5', this.#entry.name, 'bytes 0 and 1', hex(piece[other]));
    }
  }

  finish() {
    const { name, crc32: expected } = this.#entry;
    if (this.#crc !== expected) {
      const tensor = this.#names.length > 0 ? ` (the tensor ${this.#names.map(quote).join(', ')})` : '';
      const subject = `data of the entry ${quote(name)}${tensor}`;
      refuse('ZIP-15', name, `${subject} with the CRC-32 ${hex(expected)}`, hex(this.#crc));
    }
    const sha1 = this.#sha1?.digest() ?? null;
    for (const { checksum } of this.#tensors) {
      if (checksum !== null && checksum !== sha1) refuse('DATA-6', name, `the checksum ${sha1}`, quote(checksum));
    }
    const unusedBits = this.#tensors[0]?.unusedBits ?? 0;
    if (unusedBits > 0 && this.#lastByte >>> (8 - unusedBits) !== 0) {
      refuse('TENSOR-4', name, `${unusedBits} zero bits at the end`, `the last byte ${hex(this.#lastByte)}`);
    }
  }
}

// ----------------------------------------------------------------------------------------------------- The archive

/**
 * Opens an archive: checks the local header and the CRC-32 of each model, and all rules of the stage "open" except
 * FILE-1 (`fileSource` checks FILE-1). Opening reads the last 65,633 bytes, the directory, and the models with their
 * local headers. `maxModelSize` sets a limit in bytes for all models together.
 */
export async function openArchive(source, { maxModelSize = Infinity } = {}) {
  const location = await readEndRecords(source);
  const directory = await readExactly(source, location.offset, location.size);
  const entries = parseDirectory(directory, location);
  checkFalseEnds(location, source.size, entries.at(-1).headerOffset);
  const modelEntries = entries.filter((entry) => entry.isModel);
  const modelSize = modelEntries.reduce((sum, { size }) => sum + size, 0);
  if (modelSize > maxModelSize) {
    throw new LimitError(`the models have ${modelSize} bytes, the limit is ${maxModelSize}`);
  }
  const models = [];
  for (const entry of modelEntries) {
    models.push({ name: entry.name, bytes: await readEntry(source, entry, directory) });
  }
  return new Archive(source, directory, entries, matchTensors(models, entries));
}

/** The data of an entry, after its local header and CRC-32 have been checked. */
async function readEntry(source, entry, directory, tensorNames = []) {
  const bytes = await readExactly(source, entry.headerOffset, entry.end - entry.headerOffset);
  const headerSize = entry.dataOffset - entry.headerOffset;
  checkLocalHeader(entry, bytes.subarray(0, headerSize), directory);
  const data = bytes.subarray(headerSize);
  const check = new DataCheck(entry, [], tensorNames);
  check.update(data);
  check.finish();
  return data;
}

class Archive {
  #source;
  #directory;
  #byName;

  /** `entries`: { name, headerOffset, dataOffset, size, crc32 } in the order of the directory. */
  entries;
  /** The external tensors: { model, key, name, dataType, dims, entry, checksum }. `model` is the id of the model, or ''
   * for the default model; `dims` are BigInts. */
  tensors;

  constructor(source, directory, entries, tensors) {
    this.#source = source;
    this.#directory = directory;
    this.#byName = new Map(entries.map((entry) => [entry.name, entry]));
    this.entries = entries;
    this.tensors = tensors;
  }

  /** The data of an entry, as a copy. */
  async read(name) {
    const entry = this.#byName.get(name);
    if (entry === undefined) throw new RangeError(`no entry ${quote(name)}`);
    const tensors = this.tensors.filter(({ key }) => key === name);
    return readEntry(this.#source, entry, this.#directory, tensors.map((tensor) => tensor.name));
  }

  /**
   * Checks all rules of the stages "header" and "data" for every entry. `onData(entry, bytes)` is called for each piece
   * of data, in the order of the file.
   */
  async check({ onData = () => {} } = {}) {
    const bytes = new ReadAhead(this.#source);
    const tensors = new Map(this.tensors.map(({ key }) => [key, []]));
    for (const tensor of this.tensors) tensors.get(tensor.key).push(tensor);
    for (const entry of this.entries) {
      checkLocalHeader(entry, await bytes.all(entry.headerOffset, entry.dataOffset), this.#directory);
      const check = new DataCheck(entry, tensors.get(entry.name));
      for (let at = entry.dataOffset; at < entry.end; ) {
        const piece = await bytes.some(at, entry.end);
        check.update(piece);
        onData(entry, piece);
        at += piece.length;
      }
      check.finish();
    }
  }
}
