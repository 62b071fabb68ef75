/** Reads the metadata of an ONNX file, which ONNX Runtime does not give to a page. */

import { Description, TrainingError } from './types.js';

const PROPERTY = 'kfac_engine.training';
// Fields of ModelProto and of StringStringEntryProto, and the wire types of protobuf.
const METADATA = 14, KEY = 1, VALUE = 2;
const VARINT = 0, EIGHT_BYTES = 1, TEXT = 2, FOUR_BYTES = 5;

/** Yield the number of each field of a message, and the bytes of those that have bytes. */
function* fields(bytes: Uint8Array): Generator<[number, Uint8Array]> {
  let place = 0;
  const varint = (): number => {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = bytes[place++];
      if (byte === undefined) throw new TrainingError('the file ends too early');
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (place < bytes.length) {
    const tag = varint();
    const wire = tag % 8;
    let length = 0;
    if (wire === VARINT) varint();
    else if (wire === TEXT) length = varint();
    else if (wire === EIGHT_BYTES) length = 8;
    else if (wire === FOUR_BYTES) length = 4;
    else throw new TrainingError('it is no ONNX file');
    if (length > bytes.length - place) throw new TrainingError('the file ends too early');
    yield [Math.floor(tag / 8), bytes.subarray(place, place + length)];
    place += length;
  }
}

/** Return the description in the metadata of a file, which messages call `what`. */
export function describe(file: Uint8Array, what: string): Description {
  const text = new TextDecoder();
  try {
    for (const [field, bytes] of fields(file)) {
      if (field !== METADATA) continue;
      const entry = new Map(fields(bytes));
      if (text.decode(entry.get(KEY)) !== PROPERTY) continue;
      const found = JSON.parse(text.decode(entry.get(VALUE))) as Description;
      if (found.data && found.predictions && found.evaluated) return found;
      throw new TrainingError('another version of kfac_engine wrote it; export the model again');
    }
  } catch (error) {
    throw new TrainingError(`cannot read '${what}': ${(error as Error).message}.`);
  }
  throw new TrainingError(`'${what}' is no training file; write one with kfac_engine.export_training.`);
}
