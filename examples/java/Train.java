// Trains with the files of kfac_engine.export_training, in Java with ONNX Runtime alone.
//
//   javac -cp onnxruntime.jar Train.java
//   java -cp onnxruntime.jar:. Train FOLDER DIGITS STEPS
//
// The library is com.microsoft.onnxruntime:onnxruntime of Maven, on Android onnxruntime-android.
// FOLDER has the files of the digits CNN; DIGITS is written by scripts/browser_files.py: two
// numbers, images of 64 bytes from 0 to 16, and labels.

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;

public final class Train {
  private static final int BATCH = 64;
  private static final String NEW = "new ";

  /** The state: each array with the result that owns its memory. */
  private final Map<String, OnnxTensor> state = new LinkedHashMap<>();

  private final OrtEnvironment environment = OrtEnvironment.getEnvironment();
  private final OrtSession training;

  private Train(Path folder) throws OrtException {
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    options.setIntraOpNumThreads(1);
    options.setOptimizationLevel(OrtSession.SessionOptions.OptLevel.NO_OPT);
    training = environment.createSession(folder.resolve("training.onnx").toString(), options);
    try (OrtSession initial = environment.createSession(folder.resolve("initial.onnx").toString())) {
      for (Map.Entry<String, ai.onnxruntime.OnnxValue> entry : initial.run(Map.of())) {
        state.put(entry.getKey(), (OnnxTensor) entry.getValue());
      }
    }
  }

  /** Takes a step; returns the loss. An output without entries keeps the old state. */
  private float step(Map<String, OnnxTensor> batch, float rate) throws OrtException {
    Map<String, OnnxTensor> feeds = new HashMap<>(state);
    feeds.putAll(batch);
    try (OnnxTensor value = OnnxTensor.createTensor(environment, rate)) {
      feeds.put("rate", value);
      OrtSession.Result results = training.run(feeds);
      float loss = (float) results.get("loss").orElseThrow().getValue();
      for (Map.Entry<String, ai.onnxruntime.OnnxValue> entry : results) {
        OnnxTensor tensor = (OnnxTensor) entry.getValue();
        boolean isState = entry.getKey().startsWith(NEW);
        if (isState && tensor.getInfo().getNumElements() > 0) {
          state.put(entry.getKey().substring(NEW.length()), tensor).close();
        } else {
          tensor.close();
        }
      }
      return loss;
    }
  }

  public static void main(String[] arguments) throws IOException, OrtException {
    Train train = new Train(Path.of(arguments[0]));
    ByteBuffer bytes = ByteBuffer.wrap(Files.readAllBytes(Path.of(arguments[1])));
    bytes.order(ByteOrder.LITTLE_ENDIAN);
    int count = bytes.getInt();
    int examples = bytes.getInt();
    int images = bytes.position();
    for (int step = 0; step < Integer.parseInt(arguments[2]); step++) {
      float[] pixels = new float[BATCH * 64];
      long[] labels = new long[BATCH];
      for (int i = 0; i < BATCH; i++) {
        int number = (step * BATCH + i) % examples;
        for (int k = 0; k < 64; k++) pixels[64 * i + k] = bytes.get(images + 64 * number + k) / 16f;
        labels[i] = bytes.get(images + 64 * count + number);
      }
      try (OnnxTensor image = OnnxTensor.createTensor(
              train.environment, FloatBuffer.wrap(pixels), new long[] {BATCH, 1, 8, 8});
          OnnxTensor targets = OnnxTensor.createTensor(
              train.environment, LongBuffer.wrap(labels), new long[] {BATCH})) {
        System.out.println(train.step(Map.of("image", image, "targets", targets), 1f));
      }
    }
  }
}
