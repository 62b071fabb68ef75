/** Bytes by name in the IndexedDB of a site. */

import { TrainingError } from './types.js';

const DATABASE = 'kfac-engine', STORE = 'states';

const settled = <T>(request: IDBRequest<T>): Promise<T> =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(new TrainingError(`IndexedDB: ${request.error?.message ?? 'a request failed'}`));
  });

async function inStore<T>(mode: IDBTransactionMode, use: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
  if (typeof indexedDB === 'undefined') {
    throw new TrainingError('there is no IndexedDB here; call save() without a name, and store the bytes.');
  }
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const database = await settled(opening);
  try {
    const transaction = database.transaction(STORE, mode);
    const stored = new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(new TrainingError(`IndexedDB: ${transaction.error?.message ?? 'it stored nothing'}`));
    });
    const [result] = await Promise.all([settled(use(transaction.objectStore(STORE))), stored]);
    return result;
  } finally {
    database.close();
  }
}

/** Store bytes under a name, in place of others. */
export async function store(name: string, bytes: Uint8Array): Promise<void> {
  await inStore('readwrite', (states) => states.put(bytes, name));
}

/** Return the bytes under a name. */
export async function stored(name: string): Promise<Uint8Array> {
  const bytes: unknown = await inStore('readonly', (states) => states.get(name) as IDBRequest<unknown>);
  if (bytes instanceof Uint8Array) return bytes;
  throw new TrainingError(`no state is saved as '${name}'; call trainer.save('${name}') first.`);
}

/** Delete the bytes under a name, if there are any. */
export async function forget(name: string): Promise<void> {
  await inStore('readwrite', (states) => states.delete(name));
}
