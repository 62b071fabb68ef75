/** Trains the files of an export. */

import { Batches, batchesOf, BatchOptions } from './batches.js';
import { Arrays, LocalModel, Measured, Model, ModelOptions, Reader, readerOf, Results } from './model.js';
import { addressOf } from '#runtime';
import { store, stored } from './storage.js';
import { AnySignature, Description, Result, Runtime, Signature, TrainingError } from './types.js';
import { Port, remote } from './worker.js';

/** Options of `Trainer.load` and `Trainer.resume`. */
export interface LoadOptions extends ModelOptions {
  /** Where the sessions run, in place of this thread: `new Worker(…)` of `kfac-engine/worker`. */
  worker?: Port;
  /** Is called with the number of bytes that have come. */
  progress?: (bytes: number) => void;
  /** Ends the load. */
  signal?: AbortSignal;
}

/** Options of `trainer.fit`. */
export interface FitOptions {
  /** Ends the run after a whole step: the loop throws the reason of the signal. */
  signal?: AbortSignal;
  /** Value of the schedule, from the number of steps so far: 1 is the rate of the export. */
  rate?: number | ((step: number) => number);
  /** Number of steps, if the batches have no end. */
  steps?: number;
  /** Number of different examples, if they come again; `trainer.batches` knows it. */
  examples?: number;
}

/** Options of `trainer.evaluate`. */
export interface EvaluateOptions {
  signal?: AbortSignal;
  /** Is called with the number of batches that are evaluated. */
  progress?: (batches: number) => void;
}

/** What a step measured, before it changed the weights. */
export type StepRecord<M> = M & {
  /** Number of steps that were taken before, in all runs. */
  readonly step: number;
  /** Whether loss, gradients and rate were finite; otherwise the step changed nothing. */
  readonly finite: boolean;
  /** The value of the schedule. */
  readonly rate: number;
  /** How long the step took. */
  readonly milliseconds: number;
};

/** Batches: an array, a generator, or a source that reads them as they are needed. */
export type BatchSource<B> = (Iterable<B> | AsyncIterable<B>) & { readonly examples?: number };

// A page can react between two steps if this many milliseconds have passed.
const RESPONSE = 30;

/** Let the page draw and receive events; a timer would wait for milliseconds. */
const pause = (): Promise<void> =>
  new Promise((resolve) => {
    if (typeof setImmediate === 'function') {
      setImmediate(resolve);
      return;
    }
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });

/** Trains the files of one export, and predicts with them. */
export class Trainer<S extends Signature = AnySignature> {
  private constructor(private readonly model: Model) {}

  /**
   * Load the files of `kfac_engine.export_training`, with their first state.
   *
   * @param source Address of their folder, in Node also its path; or a function that returns the
   *   bytes of a file by its name.
   */
  static async load<S extends Signature = AnySignature>(source: string | URL | Reader, options: LoadOptions = {}): Promise<Trainer<S>> {
    const { worker, progress, signal, ...rest } = options;
    signal?.throwIfAborted();
    if (!worker) {
      const reader = typeof source === 'function' ? source : readerOf(source, signal, progress);
      return new Trainer<S>(await LocalModel.load(reader, rest));
    }
    if (typeof source === 'function' || (rest.runtime && typeof rest.runtime !== 'string')) {
      throw new TrainingError('a worker needs the address of the files, and of the runtime: functions and modules stay in their thread.');
    }
    const runtime = rest.runtime as string | undefined;
    const here = globalThis.location?.href;
    const absolute = runtime === undefined ? {} : { runtime: here ? new URL(runtime, here).href : runtime };
    const folder = addressOf(source, '');
    return new Trainer<S>(await remote(worker, folder, { ...rest, ...absolute }, progress));
  }

  /**
   * Load the files, and go on where a saved state ended.
   *
   * @param saved The bytes of `save()`, or the name that `save(name)` had.
   */
  static async resume<S extends Signature = AnySignature>(
    source: string | URL | Reader, saved: string | Uint8Array | ArrayBuffer | Blob, options: LoadOptions = {},
  ): Promise<Trainer<S>> {
    const trainer = await Trainer.load<S>(source, options);
    await trainer.restore(saved);
    return trainer;
  }

  /** Replace the state by a saved one, also to begin again with the first state. */
  async restore(saved: string | Uint8Array | ArrayBuffer | Blob): Promise<void> {
    const bytes = typeof saved === 'string' ? await stored(saved) : saved instanceof Blob ? await saved.arrayBuffer() : saved;
    await this.model.restore(bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes));
  }

  /** The metadata of the files: names, types and shapes. */
  get description(): Description {
    return this.model.description;
  }

  /** Return the number of steps that the state has taken. */
  steps(): Promise<number> {
    return this.model.steps();
  }

  /** Take a step on each batch, and yield what it measured. */
  async *fit(batches: BatchSource<S['batch']>, options: FitOptions = {}): AsyncGenerator<StepRecord<S['metrics']>, void, void> {
    const { signal, rate = 1, steps = Infinity } = options;
    const examples = options.examples ?? batches.examples;
    signal?.throwIfAborted();
    if (examples !== undefined) await this.model.setExamples(examples);
    let step = await this.model.steps();
    let rested = performance.now();
    let taken = 0;
    for await (const batch of batches) {
      if (taken === steps) break;
      signal?.throwIfAborted();
      if (performance.now() - rested > RESPONSE) {
        await pause();
        rested = performance.now();
        signal?.throwIfAborted();
      }
      const factor = checkedRate(typeof rate === 'function' ? rate(step) : rate);
      const { metrics, ...rest }: Measured = await this.model.take(batch as Arrays, factor);
      step = rest.step + Number(rest.finite);
      taken += 1;
      yield { ...metrics, ...rest, rate: factor } as StepRecord<S['metrics']>;
      if (taken === steps) break;
    }
  }

  /** Return the outputs of the model, in inference form. */
  async predict(inputs: S['inputs']): Promise<{ [K in keyof S['outputs']]: Result<S['outputs'][K]> }> {
    const results: Results = await this.model.predict(inputs as Arrays);
    return results as { [K in keyof S['outputs']]: Result<S['outputs'][K]> };
  }

  /** Return the metrics of all batches together, of the model as it predicts. */
  async evaluate(batches: BatchSource<S['batch']>, { signal, progress }: EvaluateOptions = {}): Promise<S['metrics']> {
    const totals = new Map<string, number[]>();
    let count = 0;
    let rested = performance.now();
    for await (const batch of batches) {
      signal?.throwIfAborted();
      for (const [name, numbers] of Object.entries(await this.model.evaluate(batch as Arrays))) {
        const known = totals.get(name);
        totals.set(name, known ? numbers.map((number, i) => number + (known[i] as number)) : numbers);
      }
      count += 1;
      progress?.(count);
      if (performance.now() - rested > RESPONSE) {
        await pause();
        rested = performance.now();
      }
    }
    if (!count) throw new TrainingError('there is no batch to evaluate; give one at least.');
    return ratios(totals) as S['metrics'];
  }

  /** Return batches of examples in arrays that have an entry for each input of a batch. */
  batches(arrays: S['batch'], options: BatchOptions = {}): Batches<S['batch']> {
    return batchesOf(this.description, arrays as Arrays, options) as Batches<S['batch']>;
  }

  /** Return the state as the bytes of a safetensors file, which Python reads as well. */
  save(): Promise<Uint8Array<ArrayBuffer>>;
  /** Save the state under a name in the IndexedDB of the site. */
  save(name: string): Promise<void>;
  async save(name?: string): Promise<Uint8Array<ArrayBuffer> | void> {
    const bytes = await this.model.save();
    return name === undefined ? bytes : store(name, bytes);
  }

  /** Free the memory of the sessions. */
  release(): Promise<void> {
    return this.model.release();
  }
}

function checkedRate(rate: number): number {
  if (!(Number.isFinite(rate) && rate >= 0)) throw new TrainingError(`rate must be a finite number of at least 0, got ${rate}.`);
  return rate;
}

/** Return metrics from their sums and counts; those of several losses are added. */
function ratios(totals: ReadonlyMap<string, readonly number[]>): Record<string, number> {
  const metrics: Record<string, number> = {};
  for (const [name, sums] of totals) {
    if (!name.endsWith(' sum')) continue;
    const metric = name.slice(0, -4);
    const counts = totals.get(`${metric} count`);
    if (counts && !counts.some(Boolean)) {
      throw new TrainingError('no target counts: each is ignored or has the weight 0; give one that counts.');
    }
    const value = sums.reduce((total, sum, i) => total + sum / (counts?.[i] || 1), 0);
    if (!Number.isFinite(value)) {
      throw new TrainingError(`the ${metric} is ${value}: a target is no class, a weight is negative, or a prediction is not finite.`);
    }
    metrics[metric] = value;
  }
  return metrics;
}

export type { Runtime };
