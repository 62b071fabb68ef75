/** Batches of examples. */

import { counts, rows, typed, Typed } from './arrays.js';
import { Arrays } from './model.js';
import { Description, TrainingError, Values } from './types.js';

/** Options of `trainer.batches`. */
export interface BatchOptions {
  /** Number of examples in a batch: 128. */
  size?: number;
  /** How often each example comes: once. */
  epochs?: number;
  /** Chooses the order of the examples: 0. */
  seed?: number;
  /** Whether each epoch has a new order, without an incomplete batch: true. */
  shuffle?: boolean;
}

/** Batches, and the number of different examples in them. */
export interface Batches<B> extends Iterable<B> {
  readonly examples: number;
}

/** Yield the numbers of the examples of each batch. */
export function* order(count: number, { size = 128, epochs = 1, seed = 0, shuffle = true }: BatchOptions = {}): Generator<Uint32Array> {
  let state = seed >>> 0;
  const random = (below: number): number => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  for (let epoch = 0; epoch < epochs; epoch++) {
    const numbers = Uint32Array.from({ length: count }, (_, i) => i);
    for (let i = count - 1; shuffle && i > 0; i--) {
      const j = random(i + 1);
      [numbers[i], numbers[j]] = [numbers[j] as number, numbers[i] as number];
    }
    const last = shuffle && count >= size ? count - size : count - 1;
    for (let start = 0; start <= last; start += size) yield numbers.slice(start, start + size);
  }
}

/** Return batches of examples in arrays, which have an entry for each input of a batch. */
export function batchesOf(description: Description, given: Arrays, options: BatchOptions): Batches<Record<string, Values>> {
  const { data, inputs, targets } = description;
  const size = options.size ?? description.batch_size ?? 128;
  if (!(Number.isInteger(size) && size > 0)) throw new TrainingError(`size must be a whole number above 0, got ${size}.`);
  const arrays: [string, Typed, number][] = Object.entries(given).map(([name, values]) => {
    const expected = data[name];
    if (!expected || name === 'rate') throw new TrainingError(`the files have no input '${name}'; their inputs are: ${Object.keys(data).join(', ')}.`);
    const axis = inputs[name] ?? targets[name] ?? expected.shape.findIndex((entry) => typeof entry === 'string');
    // Of files with one number of examples, too, the arrays have any number.
    const shape = expected.shape.map((entry, i) => (i === axis ? 'batch' : entry));
    return [name, typed(name, { type: expected.type, shape }, values), axis];
  });
  const typedArrays = Object.fromEntries(arrays.map(([name, array]) => [name, array]));
  const types = Object.fromEntries(arrays.map(([name, array, axis]) => [name, {
    type: array.type, shape: array.dims.map((entry, i) => (i === axis ? 'batch' : entry)),
  }]));
  const examples = counts(typedArrays, types).get('batch') ?? 1;
  return {
    examples,
    *[Symbol.iterator]() {
      for (const numbers of order(examples, { ...options, size })) {
        yield Object.fromEntries(arrays.map(([name, array, axis]) => [name, (axis < 0 ? array : rows(array, axis, numbers)) as Values]));
      }
    },
  };
}
