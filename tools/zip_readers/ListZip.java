import java.io.BufferedInputStream;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.zip.CRC32;
import java.util.zip.ZipEntry;
import java.util.zip.ZipFile;
import java.util.zip.ZipInputStream;

/**
 * Reads paths from standard input, one a line, and prints a line of JSON for each: the "entries" as
 * [name, size, CRC-32, SHA-256], or an "error". The first argument is "file" for ZipFile (reads the
 * directory) or "stream" for ZipInputStream (reads local headers). The data is always read: a
 * stream reaches the next entry only after the data.
 */
public class ListZip {
    static String quoted(String text) {
        StringBuilder result = new StringBuilder("\"");
        for (char unit : text.toCharArray()) {
            if (unit < ' ' || unit > '~' || unit == '"' || unit == '\\') {
                result.append(String.format("\\u%04x", (int) unit));
            } else {
                result.append(unit);
            }
        }
        return result.append('"').toString();
    }

    static String listed(ZipEntry entry, InputStream data)
            throws IOException, GeneralSecurityException {
        CRC32 crc = new CRC32();
        MessageDigest sha256 = MessageDigest.getInstance("SHA-256");
        byte[] piece = new byte[1 << 16];
        long size = 0;
        for (int count; (count = data.read(piece)) > 0; size += count) {
            crc.update(piece, 0, count);
            sha256.update(piece, 0, count);
        }
        if (entry.getMethod() != ZipEntry.STORED || entry.getComment() != null
                || entry.getCrc() != crc.getValue() || entry.getSize() != size
                || entry.getCompressedSize() != size) {
            throw new IOException("not as its header says: " + entry);
        }
        String digest = String.format("%064x", new BigInteger(1, sha256.digest()));
        return "[" + quoted(entry.getName()) + ", " + entry.getSize() + ", " + entry.getCrc()
                + ", \"" + digest + "\"]";
    }

    static List<String> byFile(Path path) throws IOException, GeneralSecurityException {
        List<String> entries = new ArrayList<>();
        try (ZipFile file = new ZipFile(path.toFile())) {
            for (ZipEntry entry : Collections.list(file.entries())) {
                entries.add(listed(entry, file.getInputStream(entry)));
            }
        }
        return entries;
    }

    static List<String> byStream(Path path) throws IOException, GeneralSecurityException {
        List<String> entries = new ArrayList<>();
        InputStream file = new BufferedInputStream(Files.newInputStream(path));
        try (ZipInputStream stream = new ZipInputStream(file)) {
            for (ZipEntry entry; (entry = stream.getNextEntry()) != null; ) {
                entries.add(listed(entry, stream));
            }
        }
        return entries;
    }

    public static void main(String[] arguments) throws IOException {
        boolean byFile = arguments[0].equals("file");
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, "UTF-8");
        BufferedReader paths =
                new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = paths.readLine()) != null; ) {
            try {
                List<String> entries = byFile ? byFile(Path.of(line)) : byStream(Path.of(line));
                out.println("{\"entries\": [" + String.join(", ", entries) + "]}");
            } catch (IOException | GeneralSecurityException | RuntimeException error) {
                out.println("{\"error\": " + quoted(error.toString()) + "}");
            }
        }
    }
}
