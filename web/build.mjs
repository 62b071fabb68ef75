// Bundles the package for pages without a bundler: one script, and one for a worker.
import { build } from 'esbuild';

await build({
  entryPoints: { 'kfac-engine': 'dist/index.js', 'kfac-engine-worker': 'dist/serve.js' },
  outdir: 'dist',
  outExtension: { '.js': '.min.js' },
  bundle: true,
  minify: true,
  format: 'esm',
  target: 'es2022',
  platform: 'browser',
  external: ['onnxruntime-web'],
  legalComments: 'none',
});
