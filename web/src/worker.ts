/** A model in another thread: what a page asks of it, and what the worker answers. */

import { LocalModel, Model, ModelOptions, Reader, readerOf } from './model.js';
import { Description, TrainingError } from './types.js';

/** A worker or a port: the end of a channel. */
export interface Port {
  postMessage(message: unknown, transfer?: Transferable[]): void;
  addEventListener(type: 'message', listener: (event: MessageEvent) => void): void;
  removeEventListener(type: 'message', listener: (event: MessageEvent) => void): void;
  start?(): void;
}

type Method = Exclude<keyof Model, 'description'>;
interface Call { id: number; method: Method | 'load'; values: unknown[] }
interface Answer { id: number; value?: unknown; error?: { message: string; refused: boolean }; bytes?: number }

/** Answer the calls of a page; a worker serves by importing `kfac-engine/worker`. */
export function serve(port: Port): void {
  let model: LocalModel | undefined;
  port.addEventListener('message', ({ data }: MessageEvent<Call>) => {
    const { id, method, values } = data;
    const answer = (rest: Omit<Answer, 'id'>, transfer?: Transferable[]): void => port.postMessage({ id, ...rest }, transfer ?? []);
    const call = async (): Promise<unknown> => {
      if (method !== 'load') {
        if (!model) throw new TrainingError('the worker has loaded no files.');
        return (model[method] as (...values: unknown[]) => Promise<unknown>)(...values);
      }
      const [folder, options] = values as [string, ModelOptions];
      model = await LocalModel.load(readerOf(folder, undefined, (bytes) => answer({ bytes })), options);
      return model.description;
    };
    call().then(
      (value) => answer({ value }, method === 'save' ? [(value as Uint8Array<ArrayBuffer>).buffer] : []),
      (error: unknown) => answer({ error: { message: (error as Error).message, refused: error instanceof TrainingError } }),
    );
  });
  port.start?.();
}

/** Return a model whose files are in a folder, and whose sessions run where a port leads. */
export async function remote(port: Port, folder: string, options: ModelOptions, progress?: (bytes: number) => void): Promise<Model> {
  let count = 0;
  const waiting = new Map<number, [(value: never) => void, (error: Error) => void]>();
  const hear = ({ data }: MessageEvent<Answer>): void => {
    if (data.bytes !== undefined) return progress?.(data.bytes);
    const [resolve, reject] = waiting.get(data.id) ?? [];
    waiting.delete(data.id);
    if (data.error) reject?.(new (data.error.refused ? TrainingError : Error)(data.error.message));
    else resolve?.(data.value as never);
  };
  const fail = (event: Event): void => {
    const reason = (event as ErrorEvent).message ?? 'its script cannot be read';
    for (const [, reject] of waiting.values()) reject(new TrainingError(`the worker has failed: ${reason}.`));
    waiting.clear();
  };
  port.addEventListener('message', hear);
  (port as unknown as EventTarget).addEventListener('error', fail);
  port.start?.();
  const call = <T>(method: Call['method'], ...values: unknown[]): Promise<T> =>
    new Promise<T>((resolve, reject) => {
      waiting.set(++count, [resolve, reject]);
      port.postMessage({ id: count, method, values });
    });
  const description = await call<Description>('load', folder, options);
  return {
    description,
    steps: () => call('steps'),
    take: (batch, rate) => call('take', batch, rate),
    predict: (inputs) => call('predict', inputs),
    evaluate: (batch) => call('evaluate', batch),
    setExamples: (examples) => call('setExamples', examples),
    save: () => call('save'),
    restore: (saved) => call('restore', saved),
    release: async () => {
      await call('release');
      port.removeEventListener('message', hear);
      (port as unknown as EventTarget).removeEventListener('error', fail);
    },
  };
}

export type { Reader };
