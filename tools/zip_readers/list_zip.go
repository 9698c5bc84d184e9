// Reads paths from standard input, one a line, and prints a line of JSON for each: the "entries" as
// [name, size, CRC-32, SHA-256], or an "error". The argument is "list" or "extract".
package main

import (
	"archive/zip"
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

func digest(file *zip.File) (string, error) {
	data, err := file.Open()
	if err != nil {
		return "", err
	}
	defer data.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, data)
	return fmt.Sprintf("%x", hash.Sum(nil)), err
}

func entries(path string, extracts bool) ([][4]any, error) {
	archive, err := zip.OpenReader(path)
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	found := [][4]any{}
	for _, file := range archive.File {
		entry := [4]any{file.Name, file.UncompressedSize64, file.CRC32, nil}
		if extracts {
			if entry[3], err = digest(file); err != nil {
				return nil, err
			}
		}
		found = append(found, entry)
	}
	return found, nil
}

func main() {
	out := json.NewEncoder(os.Stdout)
	for paths := bufio.NewScanner(os.Stdin); paths.Scan(); {
		found, err := entries(paths.Text(), os.Args[1] == "extract")
		if err != nil {
			out.Encode(map[string]any{"error": err.Error()})
		} else {
			out.Encode(map[string]any{"entries": found})
		}
	}
}
