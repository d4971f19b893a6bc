// This file owns checkpoint.json, which describes a checkpoint and holds the checksums of
// its files and of itself.

package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
)

// Version is the version of the format. Checkpoints of another version are not read.
const Version = 1

const manifestName = "checkpoint.json"

// Meta is what the trainer says about a checkpoint. This package does not interpret its
// JSON.
type Meta struct {
	Step   int             `json:"step"`   // the next step to run
	Layout json.RawMessage `json:"layout"` // how the model lies over the ranks
	Config json.RawMessage `json:"config"` // the settings of the run
	Data   json.RawMessage `json:"data"`   // the text and the position in it
	// Run is Options.Run. Checkpoints of version 0.1 of the program have none.
	Run json.RawMessage `json:"run,omitempty"`
}

// manifest is checkpoint.json.
type manifest struct {
	Version int `json:"version"`
	Meta
	Ranks int    `json:"ranks"`
	Files []File `json:"files"`
	// SHA256 is the checksum of this manifest without white space and with this field
	// empty.
	SHA256 string `json:"sha256"`
}

// File is a file of a checkpoint.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// kind says which of a rank's files is meant.
type kind uint8

const (
	model kind = iota
	optim
	kinds
)

func (k kind) String() string { return [...]string{model: "model", optim: "optim"}[k] }

// fileName returns the name of a file. It counts ranks from one, as Hugging Face does in
// the names of the parts of a model.
func fileName(k kind, rank, ranks int) string {
	return fmt.Sprintf("%v-%05d-of-%05d.safetensors", k, rank+1, ranks)
}

// sum returns the checksum of the manifest. Marshalling removes the white space of the
// raw parts and keeps everything else, so the checksum survives a round trip.
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

// otherVersion reports a checkpoint that another version of the program wrote, and that is
// not damaged.
type otherVersion struct{ version int }

func (e *otherVersion) Error() string {
	return fmt.Sprintf("%s has version %d, but this program reads version %d; use the program that wrote it", manifestName, e.version, Version)
}

// parseManifest parses and verifies the manifest of a step.
func parseManifest(text []byte, step int) (*manifest, error) {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", manifestName, input.Plain(err))
	}
	if head.Version < 1 {
		return nil, fmt.Errorf("%s is damaged: it has no version", manifestName)
	}
	if head.Version != Version {
		return nil, &otherVersion{head.Version}
	}
	m := &manifest{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("%s is damaged: %w", manifestName, input.Plain(err))
	}
	sum, err := m.sum()
	if err != nil || sum != m.SHA256 {
		return nil, fmt.Errorf("%s is damaged: its checksum does not match", manifestName)
	}
	if m.Step != step {
		return nil, fmt.Errorf("%s belongs to step %d; expected step %d", manifestName, m.Step, step)
	}
	if err := m.checkFiles(); err != nil {
		return nil, fmt.Errorf("%s %w", manifestName, err)
	}
	return m, nil
}

// checkFiles returns an error unless the file names are those that the ranks imply, so
// that no name leads out of the folder.
func (m *manifest) checkFiles() error {
	if m.Ranks < 1 || len(m.Files) != m.Ranks*int(kinds) {
		return fmt.Errorf("lists %d files for %d ranks; expected %d files for each rank", len(m.Files), m.Ranks, int(kinds))
	}
	for i, f := range m.Files {
		if want := fileName(kind(i%int(kinds)), i/int(kinds), m.Ranks); f.Name != want {
			return fmt.Errorf("lists a wrong file: expected %s, got %q", want, strings.ToValidUTF8(f.Name, "?"))
		}
	}
	return nil
}
