/** The script of a worker: `new Worker(…)` of it, or of a module that imports it. */

import { Port, serve } from './worker.js';

serve(globalThis as unknown as Port);
