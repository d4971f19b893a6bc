// This file owns checkpoint.json: what a checkpoint is, and the checksums of its
// files and of itself.

package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
)

// Version is that of the format. Reading refuses any other.
const Version = 1

const manifestName = "checkpoint.json"

// Meta is what the trainer says about a checkpoint; nothing here looks into the
// JSON.
type Meta struct {
	Step   int             `json:"step"`   // the next step to run
	Layout json.RawMessage `json:"layout"` // how the model lies over the ranks
	Config json.RawMessage `json:"config"` // the settings of the run
	Data   json.RawMessage `json:"data"`   // the text and the position in it
}

// manifest is checkpoint.json.
type manifest struct {
	Version int `json:"version"`
	Meta
	Ranks int    `json:"ranks"`
	Files []file `json:"files"`
	// SHA256 is that of this manifest without white space and with this empty.
	SHA256 string `json:"sha256"`
}

type file struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// kind is which of a rank's files.
type kind uint8

const (
	model kind = iota
	optim
	kinds
)

func (k kind) String() string { return [...]string{model: "model", optim: "optim"}[k] }

// fileName counts ranks from one, as Hugging Face names the parts of a model.
func fileName(k kind, rank, ranks int) string {
	return fmt.Sprintf("%v-%05d-of-%05d.safetensors", k, rank+1, ranks)
}

// sum is the checksum of the manifest. Marshalling drops the white space of the raw
// parts and keeps all else, so that it is the same before and after a round trip.
func (m manifest) sum() (string, error) {
	m.SHA256 = ""
	text, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	h := sha256.Sum256(text)
	return hex.EncodeToString(h[:]), nil
}

func (m manifest) encode() ([]byte, error) {
	var err error
	if m.SHA256, err = m.sum(); err != nil {
		return nil, err
	}
	text, err := json.MarshalIndent(m, "", "  ")
	return append(text, '\n'), err
}

// parseManifest reads checkpoint.json of a folder for that step.
func parseManifest(text []byte, step int) (*manifest, error) {
	var head struct{ Version int }
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", manifestName, err)
	}
	if head.Version != Version {
		return nil, fmt.Errorf("%s has version %d, and this program reads version %d", manifestName, head.Version, Version)
	}
	m := &manifest{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", manifestName, err)
	}
	sum, err := m.sum()
	if err != nil || sum != m.SHA256 {
		return nil, fmt.Errorf("%s is damaged: its checksum is wrong", manifestName)
	}
	if m.Step != step {
		return nil, fmt.Errorf("%s is that of step %d", manifestName, m.Step)
	}
	if err := m.checkFiles(); err != nil {
		return nil, fmt.Errorf("%s %w", manifestName, err)
	}
	return m, nil
}

// checkFiles wants the names that the ranks give, so that no name leads elsewhere.
func (m *manifest) checkFiles() error {
	if m.Ranks < 1 || len(m.Files) != m.Ranks*int(kinds) {
		return fmt.Errorf("names %d files for %d ranks", len(m.Files), m.Ranks)
	}
	for i, f := range m.Files {
		if want := fileName(kind(i%int(kinds)), i/int(kinds), m.Ranks); f.Name != want || f.Bytes < 0 {
			return fmt.Errorf("names %q where %s should be", strings.ToValidUTF8(f.Name, "?"), want)
		}
	}
	return nil
}
